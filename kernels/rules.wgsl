// What a request's rules do to the logits of its row, in place, before a token is chosen: one workgroup a row that has any.
//
// Edits first: repetition, frequency, presence, then bias, as an edit's token asks; what the logit was is kept in the
// edit. Then the mask: a token without its bit is never chosen.

struct Params {
  vocabulary: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read_write> logits: array<u32>; // bits of f32: NaN is told apart by integer tests
@group(0) @binding(2) var<storage, read> rules: array<Rules>;
@group(0) @binding(3) var<storage, read_write> edits: array<Edit>;
@group(0) @binding(4) var<storage, read> masks: array<u32>;

struct Rules {
  sample: u32, // row of the logits
  mask: u32, // row of the masks, or NO_MASK
  first_edit: u32,
  edit_count: u32,
  presence: f32,
  frequency: f32,
  repetition: f32,
  unused: u32,
}

override WORKGROUP_SIZE: u32 = 64u;

const NO_MASK: u32 = 0xffffffffu;
const IN_PROMPT: u32 = 0x80000000u;
const BANNED: u32 = 0x40000000u;
const COUNT_BITS: u32 = 0x3fffffffu;
const MINUS_INFINITY: u32 = 0xff800000u;
const FARTHEST: f32 = 1e38; // so that a logit stays a number whatever the rules are

fn edited(bits: u32, edit: Edit, row: Rules) -> u32 {
  if ((bits & 0x7f800000u) == 0x7f800000u) { return bits; }
  if ((edit.seen & BANNED) != 0u) { return MINUS_INFINITY; }
  var logit = bitcast<f32>(bits);
  let count = edit.seen & COUNT_BITS;
  if (edit.seen != 0u && row.repetition != 1.0) {
    logit = select(logit * row.repetition, logit / row.repetition, logit > 0.0);
  }
  logit -= row.frequency * f32(count);
  logit -= select(0.0, row.presence, count > 0u);
  return bitcast<u32>(clamp(logit + edit.bias, -FARTHEST, FARTHEST));
}

@compute @workgroup_size(WORKGROUP_SIZE)
fn main(@builtin(workgroup_id) workgroup: vec3u, @builtin(local_invocation_index) lane: u32) {
  let row = rules[workgroup.x];
  let base = row.sample * params.vocabulary;
  for (var i = lane; i < row.edit_count; i += WORKGROUP_SIZE) {
    let edit = edits[row.first_edit + i];
    if (edit.token >= params.vocabulary) { continue; }
    let bits = logits[base + edit.token];
    edits[row.first_edit + i].raw = bits;
    logits[base + edit.token] = edited(bits, edit, row);
  }
  if (row.mask == NO_MASK) { return; }
  storageBarrier();
  let words = (params.vocabulary + 31u) / 32u;
  for (var token = lane; token < params.vocabulary; token += WORKGROUP_SIZE) {
    let word = masks[row.mask * words + token / 32u];
    if (((word >> (token % 32u)) & 1u) == 0u) { logits[base + token] = MINUS_INFINITY; }
  }
}
