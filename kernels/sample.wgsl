// The next token of every sampled row, one workgroup a row: temperature, top-k, top-p, min-p, one draw.
//
// Nothing is sorted: logits are ordered by an integer key, and the threshold of top-k and top-p is found bit by bit, each
// bit with one pass over the row. Sums run in the same order for a row in any batch.

struct Params {
  vocabulary: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> logits: array<u32>; // bits of f32: NaN is told apart by integer tests
@group(0) @binding(2) var<storage, read> sampling: array<Sampling>;
@group(0) @binding(3) var<storage, read> step: array<u32>;
@group(0) @binding(4) var<storage, read_write> tokens: array<u32>;

struct Sampling {
  temperature: f32,
  top_k: u32,
  top_p: f32,
  min_p: f32,
  seed_low: u32,
  seed_high: u32,
  position: u32,
  unused: u32,
}

override WORKGROUP_SIZE: u32 = 64u;

const NO_TOKEN: u32 = 0xffffffffu;

var<workgroup> lane_keys: array<u32, WORKGROUP_SIZE>;
var<workgroup> lane_values: array<u32, WORKGROUP_SIZE>;
var<workgroup> lane_sums: array<f32, WORKGROUP_SIZE>;

// Probability relative to that of the largest logit.
fn weight_of(key: u32, largest: f32, inverse_temperature: f32) -> f32 {
  let exponent = (logit_of(key) - largest) * inverse_temperature;
  return select(0.0, exp(max(exponent, -87.0)), exponent > -87.0);
}

fn sum_lanes(lane: u32, value: f32) -> f32 {
  lane_sums[lane] = value;
  workgroupBarrier();
  var total = 0.0;
  for (var i = 0u; i < WORKGROUP_SIZE; i++) { total += lane_sums[i]; }
  workgroupBarrier();
  return total;
}

fn count_lanes(lane: u32, value: u32) -> u32 {
  lane_values[lane] = value;
  workgroupBarrier();
  var total = 0u;
  for (var i = 0u; i < WORKGROUP_SIZE; i++) { total += lane_values[i]; }
  workgroupBarrier();
  return total;
}

// Uniform in [0, 1) from the row's seed and position alone (pcg4d: Jarzynski and Olano, Hash Functions for GPU Rendering).
fn draw(row: Sampling) -> f32 {
  var v = vec4u(row.seed_low, row.seed_high, row.position, 0u) * 1664525u + 1013904223u;
  v.x += v.y * v.w;
  v.y += v.z * v.x;
  v.z += v.x * v.y;
  v.w += v.y * v.z;
  v ^= v >> vec4u(16u);
  v.x += v.y * v.w;
  v.y += v.z * v.x;
  v.z += v.x * v.y;
  v.w += v.y * v.z;
  return f32(v.w >> 8u) * (1.0 / 16777216.0);
}

@compute @workgroup_size(WORKGROUP_SIZE)
fn main(@builtin(workgroup_id) workgroup: vec3u, @builtin(local_invocation_index) lane: u32) {
  let index = workgroup.x;
  if (index >= step[2]) { return; }
  let row = sampling[index];
  let base = index * params.vocabulary;

  // The largest logit, at its lowest index.
  var best_key = 0u;
  var best_token = NO_TOKEN;
  for (var token = lane; token < params.vocabulary; token += WORKGROUP_SIZE) {
    let key = key_of(logits[base + token]);
    if (key > best_key) {
      best_key = key;
      best_token = token;
    }
  }
  lane_keys[lane] = best_key;
  lane_values[lane] = best_token;
  workgroupBarrier();
  for (var i = 0u; i < WORKGROUP_SIZE; i++) {
    if (lane_keys[i] > best_key || (lane_keys[i] == best_key && lane_values[i] < best_token)) {
      best_key = lane_keys[i];
      best_token = lane_values[i];
    }
  }
  workgroupBarrier();
  if (row.temperature == 0.0) {
    if (lane == 0u) { tokens[index] = best_token; }
    return;
  }
  let largest = logit_of(best_key);
  let inverse_temperature = 1.0 / row.temperature;

  // Top-k: the largest threshold that at least k keys reach.
  var threshold = 1u; // without key 0, the unusable logits
  if (row.top_k > 0u && row.top_k < params.vocabulary) {
    var found = 0u;
    for (var bit = 0x80000000u; bit > 0u; bit >>= 1u) {
      var count = 0u;
      for (var token = lane; token < params.vocabulary; token += WORKGROUP_SIZE) {
        count += select(0u, 1u, key_of(logits[base + token]) >= (found | bit));
      }
      found |= select(0u, bit, count_lanes(lane, count) >= row.top_k);
    }
    threshold = max(threshold, found);
  }

  // Top-p: the largest threshold whose keys reach that share of what top-k kept.
  if (row.top_p < 1.0) {
    var kept = 0.0;
    for (var token = lane; token < params.vocabulary; token += WORKGROUP_SIZE) {
      let key = key_of(logits[base + token]);
      if (key >= threshold) { kept += weight_of(key, largest, inverse_temperature); }
    }
    let wanted = row.top_p * sum_lanes(lane, kept);
    var found = 0u;
    for (var bit = 0x80000000u; bit > 0u; bit >>= 1u) {
      var mass = 0.0;
      for (var token = lane; token < params.vocabulary; token += WORKGROUP_SIZE) {
        let key = key_of(logits[base + token]);
        if (key >= max(threshold, found | bit)) { mass += weight_of(key, largest, inverse_temperature); }
      }
      let reached = sum_lanes(lane, mass) >= wanted && (found | bit) <= best_key;
      found |= select(0u, bit, reached);
    }
    threshold = max(threshold, found);
  }

  // The draw walks the kept tokens in the order of their ids; each lane owns a run of ids.
  let run = (params.vocabulary + WORKGROUP_SIZE - 1u) / WORKGROUP_SIZE;
  let run_start = min(lane * run, params.vocabulary);
  let run_end = min(run_start + run, params.vocabulary);
  var sum = 0.0;
  for (var token = run_start; token < run_end; token++) {
    let key = key_of(logits[base + token]);
    if (key >= threshold) {
      let weight = weight_of(key, largest, inverse_temperature);
      if (weight >= row.min_p) { sum += weight; }
    }
  }
  let target_mass = draw(row) * sum_lanes(lane, sum);
  // The last run that has mass and starts at or before the target; rounding cannot leave it empty-handed.
  var chosen = NO_TOKEN;
  var chosen_start = 0.0;
  var start = 0.0;
  for (var i = 0u; i < WORKGROUP_SIZE; i++) {
    if (lane_sums[i] > 0.0 && start <= target_mass) {
      chosen = i;
      chosen_start = start;
    }
    start += lane_sums[i];
  }
  if (chosen == lane) {
    var token_chosen = NO_TOKEN;
    var passed = 0.0;
    for (var token = run_start; token < run_end; token++) {
      let key = key_of(logits[base + token]);
      if (key >= threshold) {
        let weight = weight_of(key, largest, inverse_temperature);
        if (weight >= row.min_p && weight > 0.0) {
          if (chosen_start + passed <= target_mass) { token_chosen = token; }
          passed += weight;
        }
      }
    }
    tokens[index] = token_chosen;
  }
  if (lane == 0u && best_key == 0u) { tokens[index] = NO_TOKEN; }
}
