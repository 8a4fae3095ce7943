// out = x · Wᵀ with W decoded on the way. A lane makes R outputs (n, n + WORKGROUP_SIZE, …) of T rows, so a decoded
// weight serves T rows and a loaded x serves R outputs. Every output is one chain of additions in ascending k, the
// same for every R and T. No barriers and no workgroup memory: both cost more than they save on software adapters.

struct Params {
  columns: u32, // K
  outputs: u32, // of one group in this dispatch
  groups: u32, // of the whole matrix
  count_from: u32, // index into step: 0 all rows, 2 sampled rows
  width: u32, // N
  first_group: u32, // of this dispatch
  first_output: u32, // of this dispatch, in [0, N)
  segment_start: u32, // the first row of W that is in `weight` and `scale`
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> x: array<f32>;
@group(0) @binding(2) var<storage, read> weight: array<u32>;
@group(0) @binding(3) var<storage, read> scale: array<u32>;
@group(0) @binding(4) var<storage, read> scale2: array<f32>;
@group(0) @binding(5) var<storage, read> step: array<u32>;
@group(0) @binding(6) var<storage, read_write> out: array<f32>;

override WORKGROUP_SIZE: u32 = 8u;

const R: u32 = 4u;
const T: u32 = 4u;
const FORMAT: u32 = F32;

const F32: u32 = 0u;
const BF16: u32 = 1u;
const BF16_ODD: u32 = 2u; // rows of an odd number of columns do not start at a word: element by element
const E4M3: u32 = 3u;
const MXFP4: u32 = 4u;
const NVFP4: u32 = 5u;

// Elements in a word, words under one scale (0: no scale), columns under one scale; by format.
const ELEMENTS = array<u32, 6>(1u, 2u, 1u, 4u, 8u, 8u)[FORMAT];
const BLOCK_COLUMNS = array<u32, 6>(0x80000000u, 0x80000000u, 0x80000000u, 128u, 32u, 16u)[FORMAT];

// The word that holds an element in its lowest bits.
fn load_word(element: u32) -> u32 {
  if (FORMAT == BF16_ODD) { return weight[element / 2u] >> (16u * (element & 1u)); }
  return weight[element / ELEMENTS];
}

fn decode(word: u32) -> f32 {
  if (FORMAT == F32) { return bitcast<f32>(word); }
  if (FORMAT == BF16 || FORMAT == BF16_ODD) { return decode_bf16(word); }
  if (FORMAT == E4M3) { return decode_e4m3(word); }
  return decode_e2m1_doubled(word);
}

// Byte `index` of the packed scales.
fn scale_byte(index: u32) -> u32 {
  return (scale[index / 4u] >> (8u * (index & 3u))) & 255u;
}

fn load_scale(n: u32, block: u32) -> f32 {
  if (FORMAT == E4M3) { return bitcast<f32>(scale[(n / 128u) * ((params.columns + 127u) / 128u) + block]); }
  if (FORMAT == MXFP4) { return 0.5 * decode_e8m0(scale_byte(n * (params.columns / 32u) + block)); }
  if (FORMAT == NVFP4) { return 0.5 * decode_e4m3(scale_byte(n * (params.columns / 16u) + block)); }
  return 1.0;
}

@compute @workgroup_size(WORKGROUP_SIZE)
fn main(@builtin(workgroup_id) workgroup: vec3u, @builtin(local_invocation_index) lane: u32) {
  let row_count = step[params.count_from];
  let first_row = workgroup.y * T;
  if (first_row >= row_count) { return; }
  let group = params.first_group + workgroup.z;
  let first = workgroup.x * (WORKGROUP_SIZE * R) + lane; // output inside the group's run
  let run_start = params.first_output + workgroup.z * params.outputs;

  // Lanes and rows past the end repeat the last one and store nothing.
  var n: array<u32, R>;
  var w_base: array<u32, R>;
  for (var r = 0u; r < R; r++) {
    n[r] = run_start - params.segment_start + min(first + r * WORKGROUP_SIZE, params.outputs - 1u);
    w_base[r] = n[r] * params.columns;
  }
  var x_base: array<u32, T>;
  for (var t = 0u; t < T; t++) {
    x_base[t] = (min(first_row + t, row_count - 1u) * params.groups + group) * params.columns;
  }

  var sum: array<array<f32, T>, R>;
  var word: array<u32, R>;
  var factor: array<f32, R>;
  var column = 0u;
  for (var block = 0u; column < params.columns; block++) {
    for (var r = 0u; r < R; r++) { factor[r] = load_scale(n[r], block); }
    let block_end = min(column + BLOCK_COLUMNS, params.columns);
    while (column < block_end) {
      for (var r = 0u; r < R; r++) { word[r] = load_word(w_base[r] + column); }
      for (var element = 0u; element < ELEMENTS; element++) {
        var xs: array<f32, T>;
        for (var t = 0u; t < T; t++) { xs[t] = x[x_base[t] + column]; }
        for (var r = 0u; r < R; r++) {
          let w = decode(word[r]) * factor[r];
          word[r] >>= (32u / ELEMENTS) & 31u; // 0 for one element a word
          for (var t = 0u; t < T; t++) { sum[r][t] += w * xs[t]; }
        }
        column++;
      }
    }
  }

  for (var r = 0u; r < R; r++) {
    let output = first + r * WORKGROUP_SIZE;
    if (output < params.outputs) {
      for (var t = 0u; t < T; t++) {
        if (first_row + t < row_count) {
          out[(first_row + t) * params.width + run_start + output] =
            select(sum[r][t], sum[r][t] * scale2[0], FORMAT == NVFP4);
        }
      }
    }
  }
}
