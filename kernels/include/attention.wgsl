// What prefill and decode attention share: where a row's keys lie, and the weighted sum over a run of them. The file
// that includes it declares params and the bindings kv, ring, entries, selected, rows, sequences, pageTable, scores.
//
// The keys of a row in their order, which is also the order of every sum:
// | window rows before the chunk: ring | window rows of the chunk: kv | compressed entries |

// A run of at most this many keys is summed up on its own, then added to the total.
const KEYS_PER_SPLIT: u32 = 64u;

const FROM_RING: u32 = 0u;
const FROM_CHUNK: u32 = 1u;
const FROM_ENTRIES: u32 = 2u;

// `entries` is not the pool of pages but what gather.wgsl copied out of it for this block of rows.
const GATHERED: bool = false;

struct Keys {
  ring_end: u32, // keys [0, ring_end) are ring rows of positions window_start + key
  window_end: u32, // keys [ring_end, window_end) are rows of kv
  end: u32, // keys [window_end, end) are entries
  window_start: u32, // position of key 0
  ring_base: u32, // first row of the sequence's ring
  kv_offset: u32, // row of kv = key + kv_offset, modulo 2^32
  page_base: u32,
  selected_base: u32,
  chosen: bool, // entries go through `selected`
  gathered_base: u32, // first entry of the row in `entries` if that is gathered
}

fn locate_keys(row: u32) -> Keys {
  let position = rows[row].y;
  let sequence = sequences[rows[row].z];
  var keys: Keys;
  keys.window_start = position + 1u - min(position + 1u, params.window);
  keys.window_end = position + 1u - keys.window_start;
  keys.ring_end = max(sequence.y, keys.window_start) - keys.window_start;
  keys.ring_base = sequence.x * params.window;
  keys.kv_offset = sequence.z + keys.window_start - sequence.y;
  keys.page_base = rows[row].z * params.max_pages;
  keys.selected_base = row * params.topk;
  keys.chosen = params.topk != 0u && visible_entries(position) > params.topk;
  keys.end = key_count(position);
  keys.gathered_base = (row - params.row_start) * params.gathered_entries;
  return keys;
}

// Entries that exist for a query at `position`.
fn visible_entries(position: u32) -> u32 {
  return select(0u, (position + 1u) / max(params.ratio, 1u), params.ratio != 0u);
}

// Keys of a query at `position`: its window and its entries, at most topk of them if there is a selection.
fn key_count(position: u32) -> u32 {
  let entry_count = visible_entries(position);
  let taken = select(entry_count, min(entry_count, params.topk), params.topk != 0u);
  return min(position + 1u, params.window) + taken;
}

fn source_of(keys: Keys, key: u32) -> u32 {
  if (key < keys.ring_end) { return FROM_RING; }
  return select(FROM_ENTRIES, FROM_CHUNK, key < keys.window_end);
}

// First element of a key in the buffer of its source.
fn key_base(keys: Keys, source: u32, key: u32) -> u32 {
  if (source == FROM_RING) {
    return (keys.ring_base + (keys.window_start + key) % params.window) * params.head_dim;
  }
  if (source == FROM_CHUNK) { return (key + keys.kv_offset) * params.head_dim; }
  var entry = key - keys.window_end;
  if (GATHERED) { return (keys.gathered_base + entry) * params.head_dim; }
  if (keys.chosen) { entry = selected[keys.selected_base + entry]; }
  let page = pageTable[keys.page_base + entry / params.entries_per_page];
  return (page * params.entries_per_page + entry % params.entries_per_page) * params.head_dim;
}

fn load_keys(source: u32, at: vec4u) -> vec4f {
  if (source == FROM_RING) { return vec4f(ring[at.x], ring[at.y], ring[at.z], ring[at.w]); }
  if (source == FROM_CHUNK) { return vec4f(kv[at.x], kv[at.y], kv[at.z], kv[at.w]); }
  return vec4f(entries[at.x], entries[at.y], entries[at.z], entries[at.w]);
}

// Sums for 4 heads (array) and 8 dimensions (vectors).
struct Sums {
  low: array<vec4f, 4>,
  high: array<vec4f, 4>,
}

// Sum of numerator times key over keys [start, end).
fn weighted_sum(keys: Keys, score_base: vec4u, dims: Dims, start: u32, end: u32) -> Sums {
  var sum: Sums;
  for (var key = start; key < end; key++) {
    let source = source_of(keys, key);
    let base = key_base(keys, source, key);
    let low = load_keys(source, base + dims.low);
    let high = load_keys(source, base + dims.high);
    for (var h = 0u; h < 4u; h++) {
      let numerator = scores[score_base[h] + key];
      sum.low[h] += numerator * low;
      sum.high[h] += numerator * high;
    }
  }
  return sum;
}

// Heads [first, first + 4); past the end the last one again, not stored.
fn four_heads(first: u32) -> vec4u {
  return min(vec4u(first, first + 1u, first + 2u, first + 3u), vec4u(params.heads - 1u));
}

// A lane's 8 dimensions, `lanes` apart; past the end the last one again, not stored.
struct Dims {
  low: vec4u,
  high: vec4u,
}

fn eight_dims(first: u32, lanes: u32) -> Dims {
  let low = first + lanes * vec4u(0u, 1u, 2u, 3u);
  let last = vec4u(params.head_dim - 1u);
  return Dims(min(low, last), min(low + 4u * lanes, last));
}
