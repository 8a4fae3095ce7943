// Rotates interleaved pairs of the last 2·pairs dimensions of every vector by the angle of its row's position.

struct Params {
  heads: u32, // vectors in a row
  columns: u32,
  pairs: u32,
  sign: f32, // -1 rotates backwards
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read_write> x: array<f32>;
@group(0) @binding(2) var<storage, read> rows: array<vec4u>;
@group(0) @binding(3) var<storage, read> cos: array<f32>;
@group(0) @binding(4) var<storage, read> sin: array<f32>;
@group(0) @binding(5) var<storage, read> step: array<u32>;

@compute @workgroup_size(64)
fn main(@builtin(global_invocation_id) id: vec3u) {
  let row = id.y;
  if (row >= step[0] || id.x >= params.heads * params.pairs) { return; }
  let head = id.x / params.pairs;
  let pair = id.x % params.pairs;
  let angle = rows[row].y * params.pairs + pair;
  let c = cos[angle];
  let s = sin[angle] * params.sign;
  let at = (row * params.heads + head + 1u) * params.columns - 2u * (params.pairs - pair);
  let a = x[at];
  let b = x[at + 1u];
  x[at] = a * c - b * s;
  x[at + 1u] = a * s + b * c;
}
