// Choose experts and weigh them. A lane handles one row: it keeps the CHOSEN best in registers, in a bubble that needs
// no dynamic index. Bounded by E score evaluations a row.

struct Params {
  expert_count: u32, // E
  scale: f32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> logits: array<f32>;
@group(0) @binding(2) var<storage, read> bias: array<f32>;
@group(0) @binding(3) var<storage, read> tokenExperts: array<u32>;
@group(0) @binding(4) var<storage, read> rows: array<vec4u>;
@group(0) @binding(5) var<storage, read> step: array<u32>;
@group(0) @binding(6) var<storage, read_write> experts: array<u32>;
@group(0) @binding(7) var<storage, read_write> weights: array<f32>;

const CHOSEN: u32 = 6u; // K
const LOWEST: f32 = -3.4e38;

// log(1 + y) for y in [0, 1], by 2 atanh(y / (2 + y)): log(1.0 + y) loses small y to rounding.
fn log1p(y: f32) -> f32 {
  let s = y / (2.0 + y);
  let q = s * s;
  return 2.0 * s * (1.0 + q * (1.0 / 3.0 + q * (1.0 / 5.0 + q * (1.0 / 7.0 + q * (1.0 / 9.0 + q * (1.0 / 11.0 + q * (1.0 / 13.0 + q / 15.0)))))));
}

// sqrt(softplus(logit))
fn score(logit: f32) -> f32 {
  return sqrt(max(logit, 0.0) + log1p(exp(-abs(logit))));
}

// Write the chosen ids in ascending order, with their weights.
fn write_choice(row: u32, chosen: array<u32, CHOSEN>) {
  var sorted: array<u32, CHOSEN>;
  for (var i = 0u; i < CHOSEN; i++) { sorted[i] = 0xffffffffu; }
  for (var i = 0u; i < CHOSEN; i++) {
    var id = chosen[i];
    for (var j = 0u; j < CHOSEN; j++) {
      let displaced = max(id, sorted[j]);
      sorted[j] = min(id, sorted[j]);
      id = displaced;
    }
  }
  var scores: array<f32, CHOSEN>;
  var sum = 0.0;
  for (var i = 0u; i < CHOSEN; i++) {
    scores[i] = score(logits[row * params.expert_count + sorted[i]]);
    sum += scores[i];
  }
  for (var i = 0u; i < CHOSEN; i++) {
    experts[row * CHOSEN + i] = sorted[i];
    weights[row * CHOSEN + i] = scores[i] / sum * params.scale;
  }
}

@compute @workgroup_size(64)
fn scored(@builtin(global_invocation_id) id: vec3u) {
  let row = id.x;
  if (row >= step[0]) { return; }
  var best: array<f32, CHOSEN>;
  var chosen: array<u32, CHOSEN>;
  for (var i = 0u; i < CHOSEN; i++) {
    best[i] = LOWEST;
    chosen[i] = i; // stays when logits are NaN, so that ids are always valid
  }
  for (var expert = 0u; expert < params.expert_count; expert++) {
    var value = score(logits[row * params.expert_count + expert]) + bias[expert];
    var candidate = expert;
    // Descending; an equal value goes behind, so the lower id wins a tie.
    if (value > best[CHOSEN - 1u]) {
      for (var i = 0u; i < CHOSEN; i++) {
        if (value > best[i]) {
          let old_value = best[i];
          let old_id = chosen[i];
          best[i] = value;
          chosen[i] = candidate;
          value = old_value;
          candidate = old_id;
        }
      }
    }
  }
  write_choice(row, chosen);
}

@compute @workgroup_size(64)
fn hashed(@builtin(global_invocation_id) id: vec3u) {
  let row = id.x;
  if (row >= step[0]) { return; }
  var chosen: array<u32, CHOSEN>;
  for (var i = 0u; i < CHOSEN; i++) { chosen[i] = tokenExperts[rows[row].x * CHOSEN + i]; }
  write_choice(row, chosen);
}
