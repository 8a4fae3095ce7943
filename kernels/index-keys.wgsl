// Store the index keys that a step completes: from rows of f32 to words in their pages, a lane a key.

struct Params {
  width: u32, // dimensions of a key
  ratio: u32,
  entries_per_page: u32,
  max_pages: u32,
  segment_start: u32, // pages that `keys` holds; keys in others are left to other dispatches
  segment_count: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> staged: array<f32>;
@group(0) @binding(2) var<storage, read_write> keys: array<u32>;
@group(0) @binding(3) var<storage, read> rows: array<vec4u>;
@group(0) @binding(4) var<storage, read> pageTable: array<u32>;
@group(0) @binding(5) var<storage, read> step: array<u32>;

@compute @workgroup_size(64)
fn main(@builtin(global_invocation_id) id: vec3u) {
  let row = id.x;
  if (row >= step[0]) { return; }
  let position = rows[row].y;
  if ((position + 1u) % params.ratio != 0u) { return; }
  let entry = position / params.ratio;
  // Far past the count if the page is before the segment.
  let page = pageTable[rows[row].z * params.max_pages + entry / params.entries_per_page] - params.segment_start;
  if (page >= params.segment_count) { return; }
  let width = params.width;
  let source = row * width;
  let target_base = (page * params.entries_per_page + entry % params.entries_per_page) * key_words(width);

  let scale_base = target_base + element_words(width);
  var scales = 0u;
  var first = 0u;
  for (var block = 0u; first < width; block++) {
    let end = min(first + KEY_BLOCK, width);
    var largest = 0.0;
    for (var i = first; i < end; i++) { largest = max(largest, abs(staged[source + i])); }
    let exponent = select(e4m3_scale(largest), e2m1_scale(largest), PRECISION == KEYS_FP4);
    let inverse = inverse_power_of_two(exponent);
    for (var i = first; i < end; i += KEY_ELEMENTS) {
      var word = 0u;
      for (var element = 0u; element < min(KEY_ELEMENTS, end - i); element++) {
        word |= encode(staged[source + i + element], inverse) << (element * (32u / KEY_ELEMENTS));
      }
      keys[target_base + i / KEY_ELEMENTS] = word;
    }
    if (PRECISION == KEYS_FP8) { keys[scale_base] = exponent << 23u; }
    if (PRECISION == KEYS_FP4) {
      scales |= exponent << (8u * (block & 3u));
      if ((block & 3u) == 3u || end == width) {
        keys[scale_base + block / 4u] = scales;
        scales = 0u;
      }
    }
    first = end;
  }
}

// The bits of one element.
fn encode(value: f32, inverse: f32) -> u32 {
  if (PRECISION == KEYS_F32) { return bitcast<u32>(value); }
  if (PRECISION == KEYS_BF16) { return bitcast<u32>(round_bf16(value)) >> 16u; }
  if (PRECISION == KEYS_FP8) { return e4m3_bits(round_e4m3(value * inverse)); }
  return e2m1_bits(round_e2m1(value * inverse));
}

// The byte of a value that is an e4m3 number.
fn e4m3_bits(value: f32) -> u32 {
  let bits = bitcast<u32>(value);
  let magnitude = abs(value);
  let normal = ((bits >> 20u) & 0x7ffu) - (120u << 3u);
  return select(normal, u32(magnitude * 512.0), magnitude < 0.015625) | ((bits >> 24u) & 0x80u);
}

// The nibble of a value that is an e2m1 number.
fn e2m1_bits(value: f32) -> u32 {
  let bits = bitcast<u32>(value);
  let magnitude = abs(value);
  let normal = ((bits >> 22u) & 0x1ffu) - (126u << 1u);
  return select(normal, u32(magnitude * 2.0), magnitude < 1.0) | ((bits >> 28u) & 8u);
}
