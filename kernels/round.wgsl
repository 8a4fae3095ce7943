// Rounding in place, as the official runtime stores activations: `to_bf16`, a lane an element; `to_block_format`, a lane
// a block, which is scaled into e4m3 or e2m1, rounded there and scaled back.

struct Params {
  heads: u32, // vectors in a row
  columns: u32, // of a vector
  rounded_columns: u32, // the first of a vector; the others stay
  block: u32, // columns under one scale
  count_from: u32, // index into step: 0 all rows, 2 sampled rows
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read_write> x: array<f32>;
@group(0) @binding(2) var<storage, read> step: array<u32>;

const FORMAT: u32 = E4M3;

const E4M3: u32 = 0u;
const E2M1: u32 = 1u;

// Elements of one lane: rows are wide, and a dispatch has at most 65535 workgroups in a dimension.
const RUN: u32 = 4u;

@compute @workgroup_size(64)
fn to_bf16(@builtin(global_invocation_id) id: vec3u) {
  let width = params.heads * params.columns;
  if (id.y >= step[params.count_from]) { return; }
  for (var i = id.x * RUN; i < min((id.x + 1u) * RUN, width); i++) {
    let at = id.y * width + i;
    x[at] = round_bf16(x[at]);
  }
}

@compute @workgroup_size(64)
fn to_block_format(@builtin(global_invocation_id) id: vec3u) {
  let blocks = (params.rounded_columns + params.block - 1u) / params.block;
  if (id.y >= step[params.count_from] || id.x >= params.heads * blocks) { return; }
  let first = id.x % blocks * params.block;
  let end = min(first + params.block, params.rounded_columns);
  let base = (id.y * params.heads + id.x / blocks) * params.columns;
  var largest = 0.0;
  for (var column = first; column < end; column++) { largest = max(largest, abs(x[base + column])); }
  var exponent = e4m3_scale(largest);
  if (FORMAT == E2M1) { exponent = e2m1_scale(largest); }
  let scale = power_of_two(exponent);
  let inverse = inverse_power_of_two(exponent);
  for (var column = first; column < end; column++) {
    var value = x[base + column] * inverse;
    if (FORMAT == E2M1) { value = round_e2m1(value); } else { value = round_e4m3(value); }
    x[base + column] = round_bf16(value * scale);
  }
}
