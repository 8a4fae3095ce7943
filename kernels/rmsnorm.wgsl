// out = x / sqrt(mean(x²) + eps) · weight, one workgroup a vector. Four entries: with or without a weight, into another
// tensor or in place (WebGPU forbids binding one buffer for reading and for writing in one dispatch). With ROUND every
// intermediate of a plain norm is bf16 (include/round.wgsl).

struct Params {
  heads: u32, // vectors in a row
  columns: u32,
  count_from: u32, // index into step: 0 all rows, 2 sampled rows
  eps: f32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> x: array<f32>;
@group(0) @binding(2) var<storage, read> weight: array<f32>;
@group(0) @binding(3) var<storage, read> step: array<u32>;
@group(0) @binding(4) var<storage, read_write> out: array<f32>;

override WORKGROUP_SIZE: u32 = 64u;

var<workgroup> partials: array<f32, WORKGROUP_SIZE>;

// The factor of a vector from every lane's sum of squares. All lanes add the partials in the same order.
fn unit_scale(lane: u32, sum: f32) -> f32 {
  partials[lane] = sum;
  workgroupBarrier();
  var total = 0.0;
  for (var i = 0u; i < WORKGROUP_SIZE; i++) { total += partials[i]; }
  return stored(1.0 / sqrt(stored(stored(total / f32(params.columns)) + params.eps)));
}

fn sum_x(base: u32, lane: u32) -> f32 {
  var sum = 0.0;
  for (var column = lane; column < params.columns; column += WORKGROUP_SIZE) {
    let value = x[base + column];
    sum += stored(value * value);
  }
  return sum;
}

fn sum_out(base: u32, lane: u32) -> f32 {
  var sum = 0.0;
  for (var column = lane; column < params.columns; column += WORKGROUP_SIZE) {
    let value = out[base + column];
    sum += stored(value * value);
  }
  return sum;
}

fn live(workgroup: vec3u) -> bool {
  return workgroup.y < step[params.count_from];
}

fn base_of(workgroup: vec3u) -> u32 {
  return (workgroup.y * params.heads + workgroup.x) * params.columns;
}

@compute @workgroup_size(WORKGROUP_SIZE)
fn weighted(@builtin(workgroup_id) workgroup: vec3u, @builtin(local_invocation_index) lane: u32) {
  if (!live(workgroup)) { return; }
  let base = base_of(workgroup);
  let factor = unit_scale(lane, sum_x(base, lane));
  for (var column = lane; column < params.columns; column += WORKGROUP_SIZE) {
    out[base + column] = x[base + column] * factor * weight[column];
  }
}

@compute @workgroup_size(WORKGROUP_SIZE)
fn weighted_in_place(@builtin(workgroup_id) workgroup: vec3u, @builtin(local_invocation_index) lane: u32) {
  if (!live(workgroup)) { return; }
  let base = base_of(workgroup);
  let factor = unit_scale(lane, sum_out(base, lane));
  for (var column = lane; column < params.columns; column += WORKGROUP_SIZE) {
    out[base + column] = out[base + column] * factor * weight[column];
  }
}

@compute @workgroup_size(WORKGROUP_SIZE)
fn plain(@builtin(workgroup_id) workgroup: vec3u, @builtin(local_invocation_index) lane: u32) {
  if (!live(workgroup)) { return; }
  let base = base_of(workgroup);
  let factor = unit_scale(lane, sum_x(base, lane));
  for (var column = lane; column < params.columns; column += WORKGROUP_SIZE) {
    out[base + column] = stored(x[base + column] * factor);
  }
}

@compute @workgroup_size(WORKGROUP_SIZE)
fn plain_in_place(@builtin(workgroup_id) workgroup: vec3u, @builtin(local_invocation_index) lane: u32) {
  if (!live(workgroup)) { return; }
  let base = base_of(workgroup);
  let factor = unit_scale(lane, sum_out(base, lane));
  for (var column = lane; column < params.columns; column += WORKGROUP_SIZE) {
    out[base + column] = stored(out[base + column] * factor);
  }
}
