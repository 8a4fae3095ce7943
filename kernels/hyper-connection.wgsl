// Hyper-connections: `pre` makes a block's input and its gates, `post` spreads the block's output over the streams,
// `head` makes the vectors whose logits are wanted.
//
// mix = X·fnᵀ lacks the norm of X; it is a scalar of the row and applied here. In comb[i][j], i is the source stream and
// j the destination.

struct Params {
  columns: u32, // D, of one stream
  iterations: u32, // Sinkhorn: column normalisations
  norm_eps: f32,
  eps: f32,
}

@group(0) @binding(0) var<uniform> params: Params;
// What one entry writes another reads, so these are read_write in all.
@group(0) @binding(1) var<storage, read_write> streams: array<f32>;
@group(0) @binding(2) var<storage, read_write> y: array<f32>;
@group(0) @binding(3) var<storage, read_write> post: array<f32>;
@group(0) @binding(4) var<storage, read_write> comb: array<f32>;
@group(0) @binding(5) var<storage, read> mix: array<f32>;
@group(0) @binding(6) var<storage, read> base: array<f32>;
@group(0) @binding(7) var<storage, read> scale: array<f32>;
@group(0) @binding(8) var<storage, read> sampled: array<u32>;
@group(0) @binding(9) var<storage, read> step: array<u32>;
@group(0) @binding(10) var<storage, read_write> out: array<f32>;

override WORKGROUP_SIZE: u32 = 64u;
// Rows of one workgroup of `pre` and `head`, at most WORKGROUP_SIZE: one lane each makes their gates.
override WORKGROUP_ROWS: u32 = 1u;

const STREAMS: u32 = 4u;

var<workgroup> partials: array<f32, WORKGROUP_ROWS * WORKGROUP_SIZE>;
var<workgroup> gates: array<f32, WORKGROUP_ROWS * STREAMS>;

fn sigmoid(value: f32) -> f32 {
  return 1.0 / (1.0 + exp(min(-value, 88.0)));
}

// One lane's share of the sum of squares of all streams of a row.
fn sum_squares(row: u32, lane: u32) -> f32 {
  let width = STREAMS * params.columns;
  var sum = 0.0;
  for (var i = lane; i < width; i += WORKGROUP_SIZE) {
    let value = streams[row * width + i];
    sum += value * value;
  }
  return sum;
}

// 1 / rms of the row whose partial sums lie in `slot`; added in the same order for every row.
fn norm_factor(slot: u32) -> f32 {
  var total = 0.0;
  for (var i = 0u; i < WORKGROUP_SIZE; i++) { total += partials[slot * WORKGROUP_SIZE + i]; }
  return 1.0 / sqrt(total / f32(STREAMS * params.columns) + params.norm_eps);
}

// One column of Σ_i gate_i X[row, i].
fn mixed_column(row: u32, slot: u32, column: u32) -> f32 {
  var value = 0.0;
  for (var i = 0u; i < STREAMS; i++) {
    value += gates[slot * STREAMS + i] * streams[(row * STREAMS + i) * params.columns + column];
  }
  return value;
}

alias Matrix = array<array<f32, STREAMS>, STREAMS>;

fn normalise_columns(matrix: Matrix) -> Matrix {
  var result = matrix;
  for (var j = 0u; j < STREAMS; j++) {
    var sum = params.eps;
    for (var i = 0u; i < STREAMS; i++) { sum += result[i][j]; }
    for (var i = 0u; i < STREAMS; i++) { result[i][j] /= sum; }
  }
  return result;
}

fn normalise_rows(matrix: Matrix) -> Matrix {
  var result = matrix;
  for (var i = 0u; i < STREAMS; i++) {
    var sum = params.eps;
    for (var j = 0u; j < STREAMS; j++) { sum += result[i][j]; }
    for (var j = 0u; j < STREAMS; j++) { result[i][j] /= sum; }
  }
  return result;
}

// Softmax over destinations, then Sinkhorn: nearly doubly stochastic.
fn sinkhorn(logits: Matrix) -> Matrix {
  var result = logits;
  for (var i = 0u; i < STREAMS; i++) {
    var largest = result[i][0];
    for (var j = 1u; j < STREAMS; j++) { largest = max(largest, result[i][j]); }
    var sum = 0.0;
    for (var j = 0u; j < STREAMS; j++) {
      result[i][j] = exp(result[i][j] - largest);
      sum += result[i][j];
    }
    for (var j = 0u; j < STREAMS; j++) { result[i][j] = result[i][j] / sum + params.eps; }
  }
  result = normalise_columns(result);
  for (var iteration = 1u; iteration < params.iterations; iteration++) {
    result = normalise_columns(normalise_rows(result));
  }
  return result;
}

@compute @workgroup_size(WORKGROUP_SIZE)
fn pre(@builtin(workgroup_id) workgroup: vec3u, @builtin(local_invocation_index) lane: u32) {
  let first = workgroup.x * WORKGROUP_ROWS;
  if (first >= step[0]) { return; }
  let count = min(WORKGROUP_ROWS, step[0] - first);
  for (var slot = 0u; slot < count; slot++) { partials[slot * WORKGROUP_SIZE + lane] = sum_squares(first + slot, lane); }
  workgroupBarrier();
  if (lane < count) {
    let row = first + lane;
    let factor = norm_factor(lane);
    let row_mix = row * (2u + STREAMS) * STREAMS;
    for (var i = 0u; i < STREAMS; i++) {
      gates[lane * STREAMS + i] = sigmoid(mix[row_mix + i] * factor * scale[0] + base[i]) + params.eps;
      let k = STREAMS + i;
      post[row * STREAMS + i] = 2.0 * sigmoid(mix[row_mix + k] * factor * scale[1] + base[k]);
    }
    var logits: Matrix;
    for (var i = 0u; i < STREAMS; i++) {
      for (var j = 0u; j < STREAMS; j++) {
        let k = (2u + i) * STREAMS + j;
        logits[i][j] = mix[row_mix + k] * factor * scale[2] + base[k];
      }
    }
    let weights = sinkhorn(logits);
    for (var i = 0u; i < STREAMS; i++) {
      for (var j = 0u; j < STREAMS; j++) { comb[(row * STREAMS + i) * STREAMS + j] = weights[i][j]; }
    }
  }
  workgroupBarrier();
  for (var slot = 0u; slot < count; slot++) {
    let row = first + slot;
    for (var column = lane; column < params.columns; column += WORKGROUP_SIZE) {
      y[row * params.columns + column] = mixed_column(row, slot, column);
    }
  }
}

// Columns of one workgroup of `post`: its lanes load the row's gates once for several columns.
const POST_COLUMNS: u32 = 256u;

@compute @workgroup_size(WORKGROUP_SIZE)
fn post_in_place(@builtin(workgroup_id) workgroup: vec3u, @builtin(local_invocation_index) lane: u32) {
  let row = workgroup.y;
  if (row >= step[0]) { return; }
  var spread: array<f32, STREAMS>;
  var weights: Matrix;
  for (var i = 0u; i < STREAMS; i++) {
    spread[i] = post[row * STREAMS + i];
    for (var j = 0u; j < STREAMS; j++) { weights[i][j] = comb[(row * STREAMS + i) * STREAMS + j]; }
  }
  let end = min((workgroup.x + 1u) * POST_COLUMNS, params.columns);
  for (var column = workgroup.x * POST_COLUMNS + lane; column < end; column += WORKGROUP_SIZE) {
    let block = y[row * params.columns + column];
    var before: array<f32, STREAMS>;
    for (var i = 0u; i < STREAMS; i++) { before[i] = streams[(row * STREAMS + i) * params.columns + column]; }
    for (var j = 0u; j < STREAMS; j++) {
      var value = spread[j] * block;
      for (var i = 0u; i < STREAMS; i++) { value += weights[i][j] * before[i]; }
      streams[(row * STREAMS + j) * params.columns + column] = value;
    }
  }
}

@compute @workgroup_size(WORKGROUP_SIZE)
fn head(@builtin(workgroup_id) workgroup: vec3u, @builtin(local_invocation_index) lane: u32) {
  let first = workgroup.x * WORKGROUP_ROWS;
  if (first >= step[2]) { return; }
  let count = min(WORKGROUP_ROWS, step[2] - first);
  for (var slot = 0u; slot < count; slot++) { partials[slot * WORKGROUP_SIZE + lane] = sum_squares(sampled[first + slot], lane); }
  workgroupBarrier();
  if (lane < count) {
    let row_mix = sampled[first + lane] * STREAMS;
    let factor = norm_factor(lane);
    for (var i = 0u; i < STREAMS; i++) {
      gates[lane * STREAMS + i] = sigmoid(mix[row_mix + i] * factor * scale[0] + base[i]) + params.eps;
    }
  }
  workgroupBarrier();
  for (var slot = 0u; slot < count; slot++) {
    let row = sampled[first + slot];
    for (var column = lane; column < params.columns; column += WORKGROUP_SIZE) {
      out[(first + slot) * params.columns + column] = mixed_column(row, slot, column);
    }
  }
}
