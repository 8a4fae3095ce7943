// gathered[r, i] = the i-th compressed entry that row r of the block attends to. Eight lanes copy one entry.

struct Params {
  head_dim: u32, // d
  ratio: u32,
  topk: u32, // 0: no selection
  entries_per_page: u32,
  max_pages: u32,
  capacity: u32, // entries of one row of `gathered`
  row_start: u32, // first row of this block of rows
  segment_start: u32, // pages that `entries` holds; entries in others are left to other dispatches
  segment_count: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> entries: array<f32>;
@group(0) @binding(2) var<storage, read> selected: array<u32>;
@group(0) @binding(3) var<storage, read> rows: array<vec4u>;
@group(0) @binding(4) var<storage, read> pageTable: array<u32>;
@group(0) @binding(5) var<storage, read> step: array<u32>;
@group(0) @binding(6) var<storage, read_write> gathered: array<f32>;

const LANES_PER_ENTRY: u32 = 8u;

@compute @workgroup_size(64)
fn main(@builtin(global_invocation_id) id: vec3u) {
  let row = params.row_start + id.y;
  if (row >= step[0]) { return; }
  let visible = (rows[row].y + 1u) / params.ratio;
  let chosen = params.topk != 0u && visible > params.topk;
  let slot = id.x / LANES_PER_ENTRY;
  if (slot >= select(visible, params.topk, chosen)) { return; }
  var entry = slot;
  if (chosen) { entry = selected[row * params.topk + slot]; }
  // Far past the count if the page is before the segment.
  let page = pageTable[rows[row].z * params.max_pages + entry / params.entries_per_page] - params.segment_start;
  if (page >= params.segment_count) { return; }
  let source = (page * params.entries_per_page + entry % params.entries_per_page) * params.head_dim;
  let destination = (id.y * params.capacity + slot) * params.head_dim;
  for (var dim = id.x % LANES_PER_ENTRY; dim < params.head_dim; dim += LANES_PER_ENTRY) {
    gathered[destination + dim] = entries[source + dim];
  }
}
