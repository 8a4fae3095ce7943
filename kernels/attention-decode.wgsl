// The weighted sum of decode attention, split over the keys so that few rows still fill the device: `split` sums
// KEYS_PER_SPLIT keys for 8 dimensions and 4 heads a lane, `combine` adds the splits in their order and divides.
// Scores and softmax come from attention-prefill; the order of addition is the one of its `values`.

struct Params {
  heads: u32,
  head_dim: u32,
  window: u32,
  ratio: u32,
  topk: u32,
  entries_per_page: u32,
  max_pages: u32,
  max_keys: u32,
  row_start: u32,
  max_splits: u32,
  gathered_entries: u32, // entries of a row, if they are gathered
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> kv: array<f32>;
@group(0) @binding(2) var<storage, read> ring: array<f32>;
@group(0) @binding(3) var<storage, read> entries: array<f32>;
@group(0) @binding(4) var<storage, read> selected: array<u32>;
@group(0) @binding(5) var<storage, read> rows: array<vec4u>;
@group(0) @binding(6) var<storage, read> sequences: array<vec4u>;
@group(0) @binding(7) var<storage, read> pageTable: array<u32>;
@group(0) @binding(8) var<storage, read> scores: array<f32>;
@group(0) @binding(9) var<storage, read> denominators: array<f32>;
@group(0) @binding(10) var<storage, read_write> partials: array<f32>;
@group(0) @binding(11) var<storage, read_write> out: array<f32>;

override LANES: u32 = 8u;

// x: dimensions, y: row, z: split and four heads, heads fastest.
@compute @workgroup_size(LANES)
fn split(@builtin(workgroup_id) workgroup: vec3u, @builtin(local_invocation_index) lane: u32) {
  let row = params.row_start + workgroup.y;
  let keys = locate_keys(row);
  let head_tiles = (params.heads + 3u) / 4u;
  let first_head = (workgroup.z % head_tiles) * 4u;
  let split_index = workgroup.z / head_tiles;
  let start = split_index * KEYS_PER_SPLIT;
  if (start >= keys.end) { return; }
  let first_dim = workgroup.x * LANES * 8u + lane;
  let score_base = (workgroup.y * params.heads + four_heads(first_head)) * params.max_keys;
  let dims = eight_dims(first_dim, LANES);
  let sum = weighted_sum(keys, score_base, dims, start, min(start + KEYS_PER_SPLIT, keys.end));
  for (var h = 0u; h < min(4u, params.heads - first_head); h++) {
    let base = ((workgroup.y * params.max_splits + split_index) * params.heads + first_head + h) * params.head_dim;
    for (var i = 0u; i < 8u; i++) {
      let dim = first_dim + i * LANES;
      if (dim < params.head_dim) {
        partials[base + dim] = select(sum.high[h][i & 3u], sum.low[h][i & 3u], i < 4u);
      }
    }
  }
}

// x: dimension, y: row, z: head.
@compute @workgroup_size(LANES)
fn combine(@builtin(global_invocation_id) id: vec3u) {
  let dim = id.x;
  if (dim >= params.head_dim) { return; }
  let row = params.row_start + id.y;
  let count = key_count(rows[row].y);
  var total = 0.0;
  for (var index = 0u; index * KEYS_PER_SPLIT < count; index++) {
    total += partials[((id.y * params.max_splits + index) * params.heads + id.z) * params.head_dim + dim];
  }
  out[(row * params.heads + id.z) * params.head_dim + dim] = total / denominators[id.y * params.heads + id.z];
}
