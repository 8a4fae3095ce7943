// Log probabilities for the rows that ask, one workgroup a row. `rank`: the likeliest tokens and the sum of all, before
// rules change the logits. `note`: the chosen token's, once it is chosen.

struct Params {
  vocabulary: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> logits: array<u32>; // bits of f32: NaN is told apart by integer tests
@group(0) @binding(2) var<storage, read> logged: array<Logged>;
@group(0) @binding(3) var<storage, read> tokens: array<u32>;
@group(0) @binding(4) var<storage, read> edits: array<Edit>;
@group(0) @binding(5) var<storage, read_write> logprobs: array<u32>;

struct Logged {
  sample: u32, // row of the logits
  top_count: u32, // at most TOP
  first_edit: u32, // what rules.wgsl has changed in the row
  edit_count: u32,
}

override WORKGROUP_SIZE: u32 = 64u;

// A row of logprobs: the chosen token's; the largest logit and the logarithm of the sum of weights; TOP ids, TOP values.
const WORDS: u32 = 44u;
const CHOSEN: u32 = 0u;
const LARGEST: u32 = 1u;
const LOG_SUM: u32 = 2u;
const TOP_IDS: u32 = 4u;
const TOP_VALUES: u32 = 24u;
const TOP: u32 = 20u;
const NO_TOKEN: u32 = 0xffffffffu;
const LEAST: f32 = -9999.0; // of a token whose logit is no number

var<workgroup> lane_keys: array<u32, WORKGROUP_SIZE>;
var<workgroup> lane_tokens: array<u32, WORKGROUP_SIZE>;
var<workgroup> lane_sums: array<f32, WORKGROUP_SIZE>;
var<workgroup> raw_bits: u32;

@compute @workgroup_size(WORKGROUP_SIZE)
fn rank(@builtin(workgroup_id) workgroup: vec3u, @builtin(local_invocation_index) lane: u32) {
  let row = logged[workgroup.x];
  let base = row.sample * params.vocabulary;
  let out = workgroup.x * WORDS;
  var last_key = 0xffffffffu;
  var last_token = 0u;
  var largest = 0.0;
  var log_sum = 0.0;
  // Round by round the next in order of logit, then id. The first round also gives what the sum is relative to.
  for (var round = 0u; round < max(1u, row.top_count); round++) {
    var best_key = 0u;
    var best_token = NO_TOKEN;
    for (var token = lane; token < params.vocabulary; token += WORKGROUP_SIZE) {
      let key = key_of(logits[base + token]);
      let is_left = round == 0u || key < last_key || (key == last_key && token > last_token);
      if (is_left && key > best_key) {
        best_key = key;
        best_token = token;
      }
    }
    lane_keys[lane] = best_key;
    lane_tokens[lane] = best_token;
    workgroupBarrier();
    for (var i = 0u; i < WORKGROUP_SIZE; i++) {
      if (lane_keys[i] > best_key || (lane_keys[i] == best_key && lane_tokens[i] < best_token)) {
        best_key = lane_keys[i];
        best_token = lane_tokens[i];
      }
    }
    workgroupBarrier();
    last_key = best_key;
    last_token = best_token;
    if (round == 0u) {
      largest = select(0.0, logit_of(best_key), best_key > 0u);
      var sum = 0.0;
      for (var token = lane; token < params.vocabulary; token += WORKGROUP_SIZE) {
        let key = key_of(logits[base + token]);
        let exponent = logit_of(key) - largest;
        if (key > 0u && exponent > -87.0) { sum += exp(exponent); }
      }
      lane_sums[lane] = sum;
      workgroupBarrier();
      var total = 0.0;
      for (var i = 0u; i < WORKGROUP_SIZE; i++) { total += lane_sums[i]; }
      log_sum = select(0.0, log(total), total > 0.0);
      if (lane == 0u) {
        logprobs[out + LARGEST] = bitcast<u32>(largest);
        logprobs[out + LOG_SUM] = bitcast<u32>(log_sum);
      }
    }
    if (lane == 0u && round < min(row.top_count, TOP)) {
      logprobs[out + TOP_IDS + round] = select(NO_TOKEN, best_token, best_key > 0u);
      logprobs[out + TOP_VALUES + round] = bitcast<u32>(logit_of(best_key) - largest - log_sum);
    }
  }
}

@compute @workgroup_size(WORKGROUP_SIZE)
fn note(@builtin(workgroup_id) workgroup: vec3u, @builtin(local_invocation_index) lane: u32) {
  let row = logged[workgroup.x];
  let out = workgroup.x * WORDS;
  let token = tokens[row.sample];
  if (token >= params.vocabulary) { return; }
  if (lane == 0u) { raw_bits = logits[row.sample * params.vocabulary + token]; }
  workgroupBarrier();
  for (var i = lane; i < row.edit_count; i += WORKGROUP_SIZE) {
    let edit = edits[row.first_edit + i];
    if (edit.token == token) { raw_bits = edit.raw; }
  }
  workgroupBarrier();
  if (lane > 0u) { return; }
  let key = key_of(raw_bits);
  let value = logit_of(key) - bitcast<f32>(logprobs[out + LARGEST]) - bitcast<f32>(logprobs[out + LOG_SUM]);
  logprobs[out + CHOSEN] = bitcast<u32>(select(LEAST, value, key > 0u));
}
