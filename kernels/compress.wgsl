// Compressed entries: `pool` weighs the block's tokens per channel, `finish` norms, rotates and transforms the pooled
// vector where it lies, `append` keeps the chunk's last rows for later steps. Rows that complete no block do nothing.
// No barriers: they cost more on a software adapter than the second dispatch. With ROUND each of these steps is rounded
// to bf16, and the result to the blocks of its format: e4m3 in the dimensions that are not rotated, e2m1 in index keys.
//
// Tokens of an entry at row t with overlap (r = 4): | t-7 .. t-4: half A | t-3 .. t: half B |; without: t-r+1 .. t.
// Tokens before the chunk come from the tails, the others from this step's projections.

struct Params {
  ratio: u32, // r
  ring: u32, // tokens of a tail
  width: u32, // c * d
  entry_width: u32, // d
  entries_per_page: u32,
  max_pages: u32,
  pairs: u32, // R / 2
  eps: f32,
  segment_start: u32, // pages that `entries` holds; entries in others are left to other dispatches
  segment_count: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> k: array<f32>;
@group(0) @binding(2) var<storage, read> z: array<f32>;
@group(0) @binding(3) var<storage, read> ape: array<f32>;
@group(0) @binding(4) var<storage, read> norm: array<f32>;
@group(0) @binding(5) var<storage, read_write> tailK: array<f32>;
@group(0) @binding(6) var<storage, read_write> tailZ: array<f32>;
@group(0) @binding(7) var<storage, read_write> entries: array<f32>;
@group(0) @binding(8) var<storage, read> cos: array<f32>;
@group(0) @binding(9) var<storage, read> sin: array<f32>;
@group(0) @binding(10) var<storage, read> rows: array<vec4u>;
@group(0) @binding(11) var<storage, read> sequences: array<vec4u>;
@group(0) @binding(12) var<storage, read> pageTable: array<u32>;
@group(0) @binding(13) var<storage, read> step: array<u32>;

const HADAMARD: bool = false;
const STAGED: bool = false; // entries have the rows of the step
const LOWEST: f32 = -3.4e38;
const E4M3_BLOCK: u32 = 64u;
const E2M1_BLOCK: u32 = 32u;

// Place among the bound pages of the entry that a row completes; far past them if its page is before the first.
fn entry_page(sequence_index: u32, position: u32) -> u32 {
  if (STAGED) { return 0u; }
  let entry = position / params.ratio;
  return pageTable[sequence_index * params.max_pages + entry / params.entries_per_page] - params.segment_start;
}

// First element of the entry that a row completes in that page.
fn entry_base(row: u32, page: u32, position: u32) -> u32 {
  if (STAGED) { return row * params.entry_width; }
  let entry = position / params.ratio;
  return (page * params.entries_per_page + entry % params.entries_per_page) * params.entry_width;
}

// Gate logit of a row with its position's ape: the same sum whether it is used now or from the tail later.
fn gate_logit(row: u32, position: u32, channel: u32) -> f32 {
  return z[row * params.width + channel] + ape[(position % params.ratio) * params.width + channel];
}

@compute @workgroup_size(64)
fn pool(@builtin(global_invocation_id) id: vec3u) {
  let channel = id.x;
  let row = id.y;
  if (row >= step[0] || channel >= params.entry_width) { return; }
  let position = rows[row].y;
  if ((position + 1u) % params.ratio != 0u) { return; }
  let page = entry_page(rows[row].z, position);
  if (page >= params.segment_count) { return; }
  let sequence = sequences[rows[row].z];
  let chunk_start = sequence.y;
  let row_base = sequence.z;
  let tail_base = sequence.x * params.ring;

  // A ring holds exactly the tokens of one entry.
  let first = position + 1u - min(params.ring, position + 1u);
  let own_block = position + 1u - params.ratio;
  let second_half = params.width - params.entry_width;
  var largest = LOWEST;
  for (var token = first; token <= position; token++) {
    let column = channel + select(0u, second_half, token >= own_block);
    var logit: f32;
    if (token >= chunk_start) {
      logit = gate_logit(row_base + token - chunk_start, token, column);
    } else {
      logit = tailZ[(tail_base + token % params.ring) * params.width + column];
    }
    largest = max(largest, logit);
  }
  var sum = 0.0;
  var pooled = 0.0;
  for (var token = first; token <= position; token++) {
    let column = channel + select(0u, second_half, token >= own_block);
    var logit: f32;
    var value: f32;
    if (token >= chunk_start) {
      logit = gate_logit(row_base + token - chunk_start, token, column);
      value = k[(row_base + token - chunk_start) * params.width + column];
    } else {
      let index = (tail_base + token % params.ring) * params.width + column;
      logit = tailZ[index];
      value = tailK[index];
    }
    let weight = exp(logit - largest);
    sum += weight;
    pooled += weight * value;
  }
  entries[entry_base(row, page, position) + channel] = stored(pooled / sum);
}

@compute @workgroup_size(64)
fn finish(@builtin(global_invocation_id) id: vec3u) {
  let row = id.x;
  if (row >= step[0]) { return; }
  let position = rows[row].y;
  if ((position + 1u) % params.ratio != 0u) { return; }
  let page = entry_page(rows[row].z, position);
  if (page >= params.segment_count) { return; }
  let base = entry_base(row, page, position);
  let width = params.entry_width;

  var squares = 0.0;
  for (var channel = 0u; channel < width; channel++) {
    let value = entries[base + channel];
    squares += value * value;
  }
  let factor = 1.0 / sqrt(squares / f32(width) + params.eps);

  let plain = width - 2u * params.pairs;
  for (var channel = 0u; channel < plain; channel++) {
    entries[base + channel] = stored(entries[base + channel] * factor * norm[channel]);
  }
  let table = (position + 1u - params.ratio) * params.pairs;
  for (var pair = 0u; pair < params.pairs; pair++) {
    let channel = plain + 2u * pair;
    let a = stored(entries[base + channel] * factor * norm[channel]);
    let b = stored(entries[base + channel + 1u] * factor * norm[channel + 1u]);
    let c = cos[table + pair];
    let s = sin[table + pair];
    entries[base + channel] = stored(a * c - b * s);
    entries[base + channel + 1u] = stored(a * s + b * c);
  }

  if (HADAMARD) {
    for (var stride = 1u; stride < width; stride *= 2u) {
      for (var i = 0u; i < width / 2u; i++) {
        let low = base + (i / stride) * 2u * stride + i % stride;
        let a = entries[low];
        let b = entries[low + stride];
        entries[low] = a + b;
        entries[low + stride] = a - b;
      }
    }
    let scale = 1.0 / sqrt(f32(width));
    for (var channel = 0u; channel < width; channel++) { entries[base + channel] = stored(entries[base + channel] * scale); }
  }
  if (ROUND) {
    let end = select(base + plain, base + width, HADAMARD);
    let block = select(E4M3_BLOCK, E2M1_BLOCK, HADAMARD);
    for (var first = base; first < end; first += block) { round_block(first, min(first + block, end)); }
  }
}

fn round_block(first: u32, end: u32) {
  var largest = 0.0;
  for (var at = first; at < end; at++) { largest = max(largest, abs(entries[at])); }
  let exponent = select(e4m3_scale(largest), e2m1_scale(largest), HADAMARD);
  let inverse = inverse_power_of_two(exponent);
  for (var at = first; at < end; at++) {
    let scaled = entries[at] * inverse;
    entries[at] = stored(select(round_e4m3(scaled), round_e2m1(scaled), HADAMARD) * power_of_two(exponent));
  }
}

@compute @workgroup_size(64)
fn append(@builtin(global_invocation_id) id: vec3u) {
  let channel = id.x;
  let row = id.y;
  if (row >= step[0] || channel >= params.width) { return; }
  let position = rows[row].y;
  let sequence = sequences[rows[row].z];
  let chunk_end = sequence.y + sequence.w;
  if (chunk_end - position > params.ring) { return; }
  let index = (sequence.x * params.ring + position % params.ring) * params.width + channel;
  tailK[index] = k[row * params.width + channel];
  tailZ[index] = gate_logit(row, position, channel);
}
