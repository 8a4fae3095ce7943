// Attention in three barrier-free passes: `score` (a lane: 4 keys, 4 heads), `normalise` (a lane: one row and head),
// `values` (a lane: 8 dimensions, 4 heads). 8 loads serve 16 multiplications in the first, 12 serve 32 in the last.
// Scores go through memory: on a software adapter that is far cheaper than workgroup memory and barriers.

struct Params {
  heads: u32, // H
  head_dim: u32, // d
  window: u32, // W
  ratio: u32, // 0: no entries
  topk: u32, // 0: no selection
  entries_per_page: u32,
  max_pages: u32,
  max_keys: u32, // keys of one row of scores
  row_start: u32, // first row of this block of rows
  block_rows: u32, // rows of a full block
  gathered_entries: u32, // entries of a row, if they are gathered
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> queries: array<f32>;
@group(0) @binding(2) var<storage, read> kv: array<f32>;
@group(0) @binding(3) var<storage, read> ring: array<f32>;
@group(0) @binding(4) var<storage, read> entries: array<f32>;
@group(0) @binding(5) var<storage, read> selected: array<u32>;
@group(0) @binding(6) var<storage, read> sinks: array<f32>;
@group(0) @binding(7) var<storage, read> rows: array<vec4u>;
@group(0) @binding(8) var<storage, read> sequences: array<vec4u>;
@group(0) @binding(9) var<storage, read> pageTable: array<u32>;
@group(0) @binding(10) var<storage, read_write> scores: array<f32>;
@group(0) @binding(11) var<storage, read_write> denominators: array<f32>;
@group(0) @binding(12) var<storage, read_write> out: array<f32>;
@group(0) @binding(13) var<storage, read> step: array<u32>;

override LANES: u32 = 8u;

// Tile x of a row's keys, 4 a lane, never across two sources, so that a workgroup reads one buffer.
@compute @workgroup_size(LANES)
fn score(@builtin(workgroup_id) workgroup: vec3u, @builtin(local_invocation_index) lane: u32) {
  let row = params.row_start + workgroup.y;
  let keys = locate_keys(row);
  let tile_keys = LANES * 4u;
  var tile = workgroup.x;
  var source = FROM_RING;
  var start = 0u;
  var end = keys.ring_end;
  if (tile >= (end - start + tile_keys - 1u) / tile_keys) {
    tile -= (end - start + tile_keys - 1u) / tile_keys;
    source = FROM_CHUNK;
    start = keys.ring_end;
    end = keys.window_end;
    if (tile >= (end - start + tile_keys - 1u) / tile_keys) {
      tile -= (end - start + tile_keys - 1u) / tile_keys;
      source = FROM_ENTRIES;
      start = keys.window_end;
      end = keys.end;
    }
  }
  let first = start + tile * tile_keys + lane * 4u;
  if (first >= end) { return; }

  var base: vec4u;
  for (var i = 0u; i < 4u; i++) {
    base[i] = key_base(keys, source, min(first + i, end - 1u)); // past the end: the last one again, not stored
  }
  let first_head = workgroup.z * 4u;
  let query = (row * params.heads + four_heads(first_head)) * params.head_dim;
  var sum: array<vec4f, 4>;
  for (var dim = 0u; dim < params.head_dim; dim++) {
    let key = load_keys(source, base + dim);
    sum[0] += queries[query.x + dim] * key;
    sum[1] += queries[query.y + dim] * key;
    sum[2] += queries[query.z + dim] * key;
    sum[3] += queries[query.w + dim] * key;
  }
  let scale = 1.0 / sqrt(f32(params.head_dim));
  for (var h = 0u; h < min(4u, params.heads - first_head); h++) {
    let score_base = (workgroup.y * params.heads + first_head + h) * params.max_keys + first;
    for (var i = 0u; i < min(4u, end - first); i++) { scores[score_base + i] = sum[h][i] * scale; }
  }
}

// Replace scores by softmax numerators. Lane: one head of one row.
@compute @workgroup_size(LANES)
fn normalise(@builtin(global_invocation_id) id: vec3u) {
  let head = id.x % params.heads;
  let block_row = id.x / params.heads;
  let row = params.row_start + block_row;
  if (block_row >= params.block_rows || row >= step[0]) { return; }
  let count = key_count(rows[row].y);
  let base = (block_row * params.heads + head) * params.max_keys;
  var largest = sinks[head];
  for (var key = 0u; key < count; key++) { largest = max(largest, scores[base + key]); }
  var sum = exp(sinks[head] - largest);
  for (var key = 0u; key < count; key++) {
    let numerator = exp(scores[base + key] - largest);
    scores[base + key] = stored(numerator); // with ROUND the denominator is still the sum of what was not rounded
    sum += numerator;
  }
  denominators[block_row * params.heads + head] = sum;
}

@compute @workgroup_size(LANES)
fn values(@builtin(workgroup_id) workgroup: vec3u, @builtin(local_invocation_index) lane: u32) {
  let row = params.row_start + workgroup.y;
  let keys = locate_keys(row);
  let first_head = workgroup.z * 4u;
  let first_dim = workgroup.x * LANES * 8u + lane;
  let score_base = (workgroup.y * params.heads + four_heads(first_head)) * params.max_keys;
  let dims = eight_dims(first_dim, LANES);
  var total: Sums;
  for (var start = 0u; start < keys.end; start += KEYS_PER_SPLIT) {
    let sum = weighted_sum(keys, score_base, dims, start, min(start + KEYS_PER_SPLIT, keys.end));
    for (var h = 0u; h < 4u; h++) {
      total.low[h] += sum.low[h];
      total.high[h] += sum.high[h];
    }
  }
  for (var h = 0u; h < min(4u, params.heads - first_head); h++) {
    let denominator = denominators[workgroup.y * params.heads + first_head + h];
    let base = (row * params.heads + first_head + h) * params.head_dim;
    for (var i = 0u; i < 8u; i++) {
      let dim = first_dim + i * LANES;
      if (dim < params.head_dim) {
        out[base + dim] = select(total.high[h][i & 3u], total.low[h][i & 3u], i < 4u) / denominator;
      }
    }
  }
}
