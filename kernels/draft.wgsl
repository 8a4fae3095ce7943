// Around the draft block of a step that speculates. `place`: the drafts of the step before become rows that the model
// checks. `follow` and `judge`: the model has sampled; each row of the draft block gets the token that follows it, and a
// sequence goes on behind its draft only if the model chose the same. `gather`: the rows' residual streams, side by
// side. `keep`: the new drafts, for the next step.

struct Params {
  vocabulary: u32,
  columns: u32, // of `gather`: streams times their width
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> drafting: array<Drafting>;
@group(0) @binding(2) var<storage, read_write> drafts: array<u32>;
@group(0) @binding(3) var<storage, read_write> rows: array<vec4u>;
@group(0) @binding(4) var<storage, read_write> tokens: array<u32>;
@group(0) @binding(5) var<storage, read_write> draftRows: array<vec4u>;
@group(0) @binding(6) var<storage, read_write> draftSampled: array<u32>;
@group(0) @binding(7) var<storage, read_write> draftSampling: array<u32>;
@group(0) @binding(8) var<storage, read> draftStep: array<u32>;
@group(0) @binding(9) var<storage, read> chosen: array<u32>;
@group(0) @binding(10) var<storage, read> sources: array<u32>;
@group(0) @binding(11) var<storage, read> x: array<f32>;
@group(0) @binding(12) var<storage, read_write> out: array<f32>;

// A sequence that gets a new draft.
struct Drafting {
  slot: u32,
  drafted_row: u32, // the step's row that holds its draft, or NO_ROW
  first_sample: u32, // of its samples: the token that checks the draft, then the one behind the draft
  draft_row: u32, // its row of the draft block that is last if the draft is wrong, or if it has none
}

const NO_ROW: u32 = 0xffffffffu;
const NOT_REACHED: u32 = 0xfffffffeu;
const SAMPLED: u32 = 0x80000000u; // in the token of a row of the draft block: the rest is an index into tokens
const SAMPLING_WORDS: u32 = 8u;
const POSITION_WORD: u32 = 6u;

fn is_token(token: u32) -> u32 { return min(token, params.vocabulary - 1u); }

@compute @workgroup_size(64)
fn place(@builtin(global_invocation_id) id: vec3u) {
  if (id.x >= draftStep[2]) { return; }
  let sequence = drafting[id.x];
  if (sequence.drafted_row != NO_ROW) { rows[sequence.drafted_row].x = is_token(drafts[sequence.slot]); }
}

@compute @workgroup_size(64)
fn follow(@builtin(global_invocation_id) id: vec3u) {
  if (id.x >= draftStep[0]) { return; }
  let next = draftRows[id.x].x;
  if (next >= SAMPLED) { draftRows[id.x].x = is_token(tokens[next - SAMPLED]); }
}

@compute @workgroup_size(64)
fn judge(@builtin(global_invocation_id) id: vec3u) {
  if (id.x >= draftStep[2]) { return; }
  let sequence = drafting[id.x];
  var passed = 0u;
  if (sequence.drafted_row != NO_ROW) {
    passed = select(0u, 1u, tokens[sequence.first_sample] == rows[sequence.drafted_row].x);
    if (passed == 0u) { tokens[sequence.first_sample + 1u] = NOT_REACHED; }
  }
  draftSampled[id.x] = sequence.draft_row + passed;
  draftSampling[id.x * SAMPLING_WORDS + POSITION_WORD] += passed;
}

@compute @workgroup_size(64)
fn gather(@builtin(global_invocation_id) id: vec3u) {
  if (id.y >= draftStep[0] || id.x >= params.columns) { return; }
  out[id.y * params.columns + id.x] = x[sources[id.y] * params.columns + id.x];
}

@compute @workgroup_size(64)
fn keep(@builtin(global_invocation_id) id: vec3u) {
  if (id.x < draftStep[2]) { drafts[drafting[id.x].slot] = is_token(chosen[id.x]); }
}
