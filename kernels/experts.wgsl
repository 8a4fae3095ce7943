// Mixture of experts. `count` and `place` group the (row, choice) pairs by expert, stably and without atomics;
// `gate_up` and `down` multiply tiles of PAIRS pairs of one expert; `combine` sums a row's experts and the shared one.
// A lane makes 8 outputs for PAIRS pairs: a decoded weight serves all pairs, a loaded input all outputs. Every output
// is one chain of additions in ascending column, the same for every PAIRS.
//
// With ROUND every product, the hidden layer and the sum are rounded to bf16 (include/round.wgsl).
//
// A pair is row * K + choice. Few rows skip the grouping: tile i is pair i.

struct Params {
  columns: u32, // inputs of a matrix
  outputs: u32, // outputs of one part
  chosen_count: u32, // K
  expert_count: u32, // E
  tile_capacity: u32,
  limit: f32,
  segment_start: u32, // experts whose weights are bound; tiles of others are left to other dispatches
  segment_count: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> step: array<u32>;
@group(0) @binding(2) var<storage, read> x: array<f32>;
@group(0) @binding(3) var<storage, read> experts: array<u32>;
@group(0) @binding(4) var<storage, read> weights: array<f32>;
@group(0) @binding(5) var<storage, read> weight: array<u32>;
@group(0) @binding(6) var<storage, read> scale: array<u32>;
@group(0) @binding(7) var<storage, read> scale2: array<f32>;
@group(0) @binding(8) var<storage, read_write> counts: array<u32>;
@group(0) @binding(9) var<storage, read_write> order: array<u32>;
@group(0) @binding(10) var<storage, read_write> tiles: array<vec4u>;
@group(0) @binding(11) var<storage, read> shared_out: array<f32>;
@group(0) @binding(12) var<storage, read_write> out: array<f32>;

override LANES: u32 = 8u;

const PAIRS: u32 = 1u; // of a tile; 1: tiles are pairs, not grouped
const FORMAT: u32 = F32;

const F32: u32 = 0u;
const BF16: u32 = 1u;
const E4M3: u32 = 2u;
const MXFP4: u32 = 3u;
const NVFP4: u32 = 4u;

// By format: elements in a word, columns under one scale.
const ELEMENTS = array<u32, 5>(1u, 2u, 4u, 8u, 8u)[FORMAT];
const BLOCK_COLUMNS = array<u32, 5>(0x80000000u, 0x80000000u, 128u, 32u, 16u)[FORMAT];

// Lane: expert. Count its pairs.
@compute @workgroup_size(64)
fn count(@builtin(global_invocation_id) id: vec3u) {
  let expert = id.x;
  if (expert >= params.expert_count) { return; }
  let pair_count = step[0] * params.chosen_count;
  var found = 0u;
  for (var pair = 0u; pair < pair_count; pair++) { found += u32(experts[pair] == expert); }
  counts[expert] = found;
}

// Lane: expert. List its pairs behind those of the experts before it and describe its tiles of GROUP pairs.
// The lanes past the experts mark the tiles that are not used as empty.
const GROUP: u32 = 4u;

@compute @workgroup_size(64)
fn place(@builtin(global_invocation_id) id: vec3u) {
  let expert = id.x;
  var next = 0u;
  var tile = 0u;
  for (var before = 0u; before < min(expert, params.expert_count); before++) {
    next += counts[before];
    tile += (counts[before] + GROUP - 1u) / GROUP;
  }
  if (expert >= params.expert_count) {
    tile += expert - params.expert_count;
    if (tile < params.tile_capacity) { tiles[tile] = vec4u(); }
    return;
  }
  let first = next;
  let end = next + counts[expert];
  // Reads stop at the expert's last pair.
  for (var pair = 0u; next < end; pair++) {
    if (experts[pair] == expert) {
      order[next] = pair;
      next += 1u;
    }
  }
  for (var start = first; start < end; start += GROUP) {
    tiles[tile] = vec4u(expert, start, min(GROUP, end - start), 0u);
    tile += 1u;
  }
}

struct Tile {
  expert: u32,
  pair_count: u32, // 0: nothing to do
  pairs: array<u32, PAIRS>, // past the count: the last one again, not stored
}

fn read_tile(index: u32) -> Tile {
  var tile: Tile;
  if (PAIRS == 1u) {
    tile.expert = experts[index];
    tile.pair_count = u32(index < step[0] * params.chosen_count);
    tile.pairs[0] = index;
    return tile;
  }
  let entry = tiles[index];
  tile.expert = entry.x;
  tile.pair_count = entry.z;
  for (var t = 0u; t < PAIRS; t++) { tile.pairs[t] = order[entry.y + min(t, max(entry.z, 1u) - 1u)]; }
  return tile;
}

fn load_words(rows: vec4u, column: u32) -> vec4u {
  let at = (rows * params.columns + column) / ELEMENTS;
  return vec4u(weight[at.x], weight[at.y], weight[at.z], weight[at.w]);
}

fn decode(word: u32) -> f32 {
  if (FORMAT == F32) { return bitcast<f32>(word); }
  if (FORMAT == BF16) { return decode_bf16(word); }
  if (FORMAT == E4M3) { return decode_e4m3(word); }
  return decode_e2m1_doubled(word);
}

fn decode_words(words: vec4u) -> vec4f {
  return vec4f(decode(words.x), decode(words.y), decode(words.z), decode(words.w));
}

// Byte `index` of the packed scales.
fn scale_byte(index: u32) -> u32 {
  return (scale[index / 4u] >> (8u * (index & 3u))) & 255u;
}

// Scale of block `block` of columns in output n of an expert's part.
fn load_scale(matrix: u32, n: u32, block: u32) -> f32 {
  if (FORMAT == E4M3) {
    let grid_rows = (params.outputs + 127u) / 128u;
    let grid_columns = (params.columns + 127u) / 128u;
    return bitcast<f32>(scale[(matrix * grid_rows + n / 128u) * grid_columns + block]);
  }
  let row = matrix * params.outputs + n;
  if (FORMAT == MXFP4) { return 0.5 * decode_e8m0(scale_byte(row * (params.columns / 32u) + block)); }
  if (FORMAT == NVFP4) { return 0.5 * decode_e4m3(scale_byte(row * (params.columns / 16u) + block)); }
  return 1.0;
}

fn load_scales(matrix: u32, n: vec4u, block: u32) -> vec4f {
  return vec4f(
    load_scale(matrix, n.x, block),
    load_scale(matrix, n.y, block),
    load_scale(matrix, n.z, block),
    load_scale(matrix, n.w, block),
  );
}

// Outputs n_a of matrix_a and n_b of matrix_b for every input of a tile.
struct Products {
  a: array<vec4f, PAIRS>,
  b: array<vec4f, PAIRS>,
}

fn multiply(matrix_a: u32, n_a: vec4u, matrix_b: u32, n_b: vec4u, inputs: array<u32, PAIRS>) -> Products {
  let rows_a = matrix_a * params.outputs + n_a;
  let rows_b = matrix_b * params.outputs + n_b;
  var sum: Products;
  var column = 0u;
  for (var block = 0u; column < params.columns; block++) {
    let scales_a = load_scales(matrix_a, n_a, block);
    let scales_b = load_scales(matrix_b, n_b, block);
    let block_end = min(column + BLOCK_COLUMNS, params.columns);
    while (column < block_end) {
      var words_a = load_words(rows_a, column);
      var words_b = load_words(rows_b, column);
      for (var element = 0u; element < ELEMENTS; element++) {
        let w_a = decode_words(words_a) * scales_a;
        let w_b = decode_words(words_b) * scales_b;
        words_a >>= vec4u((32u / ELEMENTS) & 31u); // 0 for one element a word
        words_b >>= vec4u((32u / ELEMENTS) & 31u);
        for (var t = 0u; t < PAIRS; t++) {
          let value = x[inputs[t] + column];
          sum.a[t] += w_a * value;
          sum.b[t] += w_b * value;
        }
        column++;
      }
    }
  }
  if (FORMAT == NVFP4) {
    for (var t = 0u; t < PAIRS; t++) {
      sum.a[t] *= scale2[matrix_a];
      sum.b[t] *= scale2[matrix_b];
    }
  }
  return sum;
}

fn four_outputs(first: u32) -> vec4u {
  return min(first + vec4u(0u, 1u, 2u, 3u), vec4u(params.outputs - 1u)); // past the end: not stored
}

// x: 4 hidden dimensions a lane, both parts; y: tile. `out` is the hidden layer, by pair.
@compute @workgroup_size(LANES)
fn gate_up(@builtin(workgroup_id) workgroup: vec3u, @builtin(local_invocation_index) lane: u32) {
  let tile = read_tile(workgroup.y);
  let first = (workgroup.x * LANES + lane) * 4u;
  let expert = tile.expert - params.segment_start; // wraps far past the count below the start
  if (tile.pair_count == 0u || expert >= params.segment_count || first >= params.outputs) { return; }
  var inputs: array<u32, PAIRS>;
  for (var t = 0u; t < PAIRS; t++) { inputs[t] = tile.pairs[t] / params.chosen_count * params.columns; }
  let n = four_outputs(first);
  let matrix = expert * 2u;
  let products = multiply(matrix, n, matrix + 1u, n, inputs);
  for (var t = 0u; t < PAIRS; t++) {
    if (t < tile.pair_count) {
      let pair = tile.pairs[t];
      let gate = min(stored_vec4(products.a[t]), vec4f(params.limit));
      let up = clamp(stored_vec4(products.b[t]), vec4f(-params.limit), vec4f(params.limit));
      let hidden = stored_vec4(gate / (1.0 + exp(-gate)) * up * weights[pair]);
      for (var i = 0u; i < min(4u, params.outputs - first); i++) { out[pair * params.outputs + first + i] = hidden[i]; }
    }
  }
}

// x: 8 output dimensions a lane; y: tile. x is the hidden layer, `out` the experts' outputs, both by pair.
@compute @workgroup_size(LANES)
fn down(@builtin(workgroup_id) workgroup: vec3u, @builtin(local_invocation_index) lane: u32) {
  let tile = read_tile(workgroup.y);
  let first = (workgroup.x * LANES + lane) * 8u;
  let expert = tile.expert - params.segment_start;
  if (tile.pair_count == 0u || expert >= params.segment_count || first >= params.outputs) { return; }
  var inputs: array<u32, PAIRS>;
  for (var t = 0u; t < PAIRS; t++) { inputs[t] = tile.pairs[t] * params.columns; }
  let products = multiply(expert, four_outputs(first), expert, four_outputs(first + 4u), inputs);
  for (var t = 0u; t < PAIRS; t++) {
    if (t < tile.pair_count) {
      let base = tile.pairs[t] * params.outputs + first;
      for (var i = 0u; i < min(4u, params.outputs - first); i++) { out[base + i] = stored(products.a[t][i]); }
      for (var i = 4u; i < min(8u, params.outputs - first); i++) { out[base + i] = stored(products.b[t][i - 4u]); }
    }
  }
}

// Lane: one dimension of one row (y). x holds the experts' outputs by pair, ids ascending within a row.
@compute @workgroup_size(LANES)
fn combine(@builtin(global_invocation_id) id: vec3u) {
  let dim = id.x;
  let row = id.y;
  if (row >= step[0] || dim >= params.outputs) { return; }
  var sum = 0.0;
  for (var choice = 0u; choice < params.chosen_count; choice++) {
    sum += x[(row * params.chosen_count + choice) * params.outputs + dim];
  }
  out[row * params.outputs + dim] = stored(sum + shared_out[row * params.outputs + dim]);
}
