// out = a·sigmoid(a)·b with a = min(gate, limit) and b = clamp(up, -limit, limit).

struct Params {
  columns: u32,
  limit: f32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> gate: array<f32>;
@group(0) @binding(2) var<storage, read> up: array<f32>;
@group(0) @binding(3) var<storage, read> step: array<u32>;
@group(0) @binding(4) var<storage, read_write> out: array<f32>;

@compute @workgroup_size(64)
fn main(@builtin(global_invocation_id) id: vec3u) {
  if (id.y >= step[0] || id.x >= params.columns) { return; }
  let at = id.y * params.columns + id.x;
  let a = min(gate[at], params.limit);
  let b = clamp(up[at], -params.limit, params.limit);
  // exp(-a) overflows below -88, where the quotient is 0 within f32; the clamp keeps infinities out of the arithmetic.
  out[at] = a / (1.0 + exp(min(-a, 88.0))) * b;
}
