// Append the step's keys to the rings. A lane copies one dimension of one row; rows that the same chunk would
// overwrite again are left out, so no two lanes write one element.

struct Params {
  width: u32, // d
  window: u32, // W
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> kv: array<f32>;
@group(0) @binding(2) var<storage, read_write> ring: array<f32>;
@group(0) @binding(3) var<storage, read> rows: array<vec4u>;
@group(0) @binding(4) var<storage, read> sequences: array<vec4u>;
@group(0) @binding(5) var<storage, read> step: array<u32>;

@compute @workgroup_size(64)
fn main(@builtin(global_invocation_id) id: vec3u) {
  let dim = id.x;
  let row = id.y;
  if (row >= step[0] || dim >= params.width) { return; }
  let position = rows[row].y;
  let sequence = sequences[rows[row].z];
  let chunk_end = sequence.y + sequence.w;
  if (chunk_end - position > params.window) { return; }
  ring[(sequence.x * params.window + position % params.window) * params.width + dim] = kv[row * params.width + dim];
}
