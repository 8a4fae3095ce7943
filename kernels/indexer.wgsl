// The lightning indexer. `transform`: a lane does one vector's butterflies in place. `score`: a lane scores 4 entries,
// 8 heads at a time, so that 12 loads serve 32 multiplications. `select`: a workgroup finds one row's topk-th largest
// score digit by digit, then writes the indices above it in order; only integers are counted atomically. With ROUND
// dot products, head weights, their products and the sum are rounded to bf16 (include/round.wgsl).

struct Params {
  heads: u32,
  width: u32, // dimensions of an index key
  ratio: u32,
  entries_per_page: u32,
  max_pages: u32,
  capacity: u32, // entries of a row of scores
  row_start: u32, // first row of this block of rows
  topk: u32,
  segment_start: u32, // pages that `keys` holds; entries in others are left to other dispatches
  segment_count: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read_write> queries: array<f32>;
@group(0) @binding(2) var<storage, read> headWeights: array<f32>;
@group(0) @binding(3) var<storage, read> keys: array<u32>; // include/index-keys.wgsl
@group(0) @binding(4) var<storage, read_write> scores: array<f32>;
@group(0) @binding(5) var<storage, read_write> selected: array<u32>;
@group(0) @binding(6) var<storage, read> rows: array<vec4u>;
@group(0) @binding(7) var<storage, read> pageTable: array<u32>;
@group(0) @binding(8) var<storage, read> step: array<u32>;

const LANES: u32 = 64u;
const HEADS: u32 = 8u; // of one pass over the keys, fewer if the model has fewer

@compute @workgroup_size(LANES)
fn transform(@builtin(global_invocation_id) id: vec3u) {
  let vector = id.x;
  if (vector >= step[0] * params.heads) { return; }
  let width = params.width;
  let base = vector * width;
  for (var stride = 1u; stride < width; stride *= 2u) {
    for (var i = 0u; i < width / 2u; i++) {
      let low = base + (i / stride) * 2u * stride + i % stride;
      let a = queries[low];
      let b = queries[low + stride];
      queries[low] = a + b;
      queries[low + stride] = a - b;
    }
  }
  let scale = 1.0 / sqrt(f32(width));
  for (var dim = 0u; dim < width; dim++) { queries[base + dim] *= scale; }
}

// Visible entries of a row, or 0 if all of them are taken without looking at scores.
fn candidate_count(row: u32) -> u32 {
  let count = (rows[row].y + 1u) / params.ratio;
  return select(0u, count, count > params.topk);
}

@compute @workgroup_size(LANES)
fn score(@builtin(global_invocation_id) id: vec3u) {
  let row = params.row_start + id.y;
  if (row >= step[0]) { return; }
  let count = candidate_count(row);
  let first = id.x * 4u;
  if (first >= count) { return; }

  let width = params.width;
  var key_base: vec4u;
  var bound: vec4<bool>;
  for (var i = 0u; i < 4u; i++) {
    let entry = min(first + i, count - 1u); // past the end: the last one again, not stored
    // Far past the count if the page is before the segment.
    let page = pageTable[rows[row].z * params.max_pages + entry / params.entries_per_page] - params.segment_start;
    bound[i] = page < params.segment_count;
    let index = select(0u, page, bound[i]) * params.entries_per_page + entry % params.entries_per_page;
    key_base[i] = index * key_words(width);
  }
  if (!any(bound)) { return; }

  let scale = 1.0 / sqrt(f32(width * params.heads));
  var total = vec4f();
  for (var head = 0u; head < params.heads; head += HEADS) {
    var query_base: array<u32, HEADS>;
    var sum: array<vec4f, HEADS>;
    for (var i = 0u; i < HEADS; i++) {
      query_base[i] = (row * params.heads + min(head + i, params.heads - 1u)) * width;
      sum[i] = vec4f();
    }
    var key_scale = load_key_scales(key_base, 0u);
    for (var index = 0u; index < element_words(width); index++) {
      if (PRECISION == KEYS_FP4 && index % BLOCK_WORDS == 0u) {
        key_scale = load_key_scales(key_base, index / BLOCK_WORDS);
      }
      let at = key_base + index;
      var words = vec4u(keys[at.x], keys[at.y], keys[at.z], keys[at.w]);
      for (var element = 0u; element < KEY_ELEMENTS; element++) {
        let key = decode_keys(words) * key_scale;
        words >>= vec4u((32u / KEY_ELEMENTS) & 31u); // 0 for one element a word
        // A word that is not full ends in zeros.
        var dim = index * KEY_ELEMENTS + element;
        if (KEY_ELEMENTS > 1u) { dim = min(dim, width - 1u); }
        for (var i = 0u; i < HEADS; i++) { sum[i] += queries[query_base[i] + dim] * key; }
      }
    }
    for (var i = 0u; i < HEADS; i++) {
      if (head + i < params.heads) {
        let weight = headWeights[row * params.heads + head + i];
        if (ROUND) {
          total += stored_vec4(stored(weight * scale) * max(stored_vec4(sum[i]), vec4f()));
        } else {
          total += weight * max(sum[i], vec4f());
        }
      }
    }
  }
  if (ROUND) { total = stored_vec4(total); } else { total *= scale; }
  for (var i = 0u; i < 4u; i++) {
    if (first + i < count && bound[i]) { scores[id.y * params.capacity + first + i] = total[i]; }
  }
}

const BLOCK_WORDS: u32 = 4u; // of FP4: 32 elements

fn load_key_scales(base: vec4u, block: u32) -> vec4f {
  return vec4f(
    load_key_scale(base.x, block),
    load_key_scale(base.y, block),
    load_key_scale(base.z, block),
    load_key_scale(base.w, block),
  );
}

fn load_key_scale(base: u32, block: u32) -> f32 {
  if (PRECISION == KEYS_FP8) { return bitcast<f32>(keys[base + element_words(params.width)]); }
  if (PRECISION == KEYS_FP4) {
    let word = keys[base + element_words(params.width) + block / 4u];
    return 0.5 * decode_e8m0((word >> (8u * (block & 3u))) & 255u);
  }
  return 1.0;
}

// The lowest element of each word, FP4 doubled.
fn decode_key(word: u32) -> f32 {
  if (PRECISION == KEYS_F32) { return bitcast<f32>(word); }
  if (PRECISION == KEYS_BF16) { return decode_bf16(word); }
  if (PRECISION == KEYS_FP8) { return decode_e4m3(word); }
  return decode_e2m1_doubled(word);
}

fn decode_keys(words: vec4u) -> vec4f {
  return vec4f(decode_key(words.x), decode_key(words.y), decode_key(words.z), decode_key(words.w));
}

const DIGIT_BITS: u32 = 4u;

var<workgroup> histogram: array<atomic<u32>, 16>;
var<workgroup> threshold: u32; // the leading digits found so far of the topk-th largest key
var<workgroup> wanted: u32; // how many entries with exactly those digits belong to the topk
var<workgroup> above_before: array<u32, LANES>;
var<workgroup> equal_before: array<u32, LANES>;

// An integer that orders as the f32 does.
fn order_key(index: u32) -> u32 {
  let bits = bitcast<u32>(scores[index]);
  if (bits == 0x80000000u) { return 0x80000000u; } // -0 ties with 0
  return bits ^ select(0x80000000u, 0xffffffffu, bits >= 0x80000000u);
}

@compute @workgroup_size(LANES)
fn select_topk(@builtin(workgroup_id) workgroup: vec3u, @builtin(local_invocation_index) lane: u32) {
  let row = params.row_start + workgroup.x;
  if (row >= step[0]) { return; }
  let count = candidate_count(row);
  if (count == 0u) { return; }
  let base = workgroup.x * params.capacity;

  if (lane == 0u) {
    threshold = 0u;
    wanted = params.topk;
  }
  for (var digit = 0u; digit < 32u / DIGIT_BITS; digit++) {
    let known = ~(0xffffffffu >> (digit * DIGIT_BITS));
    let shift = 32u - (digit + 1u) * DIGIT_BITS;
    if (lane < 16u) { atomicStore(&histogram[lane], 0u); }
    workgroupBarrier();
    let prefix = threshold;
    for (var entry = lane; entry < count; entry += LANES) {
      let key = order_key(base + entry);
      if ((key & known) == prefix) { atomicAdd(&histogram[(key >> shift) & 15u], 1u); }
    }
    workgroupBarrier();
    if (lane == 0u) {
      var rest = wanted;
      var value = 15u;
      // The counts of all digits sum to at least `rest`, so the loop ends at 0 at the latest.
      while (value > 0u && atomicLoad(&histogram[value]) < rest) {
        rest -= atomicLoad(&histogram[value]);
        value -= 1u;
      }
      threshold = prefix | (value << shift);
      wanted = rest;
    }
    workgroupBarrier();
  }

  // Each lane takes a run of consecutive entries, so the indices come out ascending.
  let run = (count + LANES - 1u) / LANES;
  let start = min(lane * run, count);
  let end = min(start + run, count);
  let limit = threshold;
  let ties = wanted;
  var above = 0u;
  var equal = 0u;
  for (var entry = start; entry < end; entry++) {
    let key = order_key(base + entry);
    above += u32(key > limit);
    equal += u32(key == limit);
  }
  above_before[lane] = above;
  equal_before[lane] = equal;
  workgroupBarrier();
  if (lane == 0u) {
    above = 0u;
    equal = 0u;
    for (var i = 0u; i < LANES; i++) {
      let own_above = above_before[i];
      let own_equal = equal_before[i];
      above_before[i] = above;
      equal_before[i] = equal;
      above += own_above;
      equal += own_equal;
    }
  }
  workgroupBarrier();
  var seen = equal_before[lane];
  var slot = above_before[lane] + min(seen, ties);
  for (var entry = start; entry < end; entry++) {
    let key = order_key(base + entry);
    if (key > limit || (key == limit && seen < ties)) {
      selected[row * params.topk + slot] = entry;
      slot += 1u;
    }
    seen += u32(key == limit);
  }
}
