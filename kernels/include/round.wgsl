// Rounding of f32 values to the narrow formats, to nearest with ties to even. Only integer arithmetic and exact
// multiplications by powers of two, so that every adapter gives the same bits.

// Kernels whose results are rounded to bf16 in the mode of the official runtime; specialised by their wrappers.
const ROUND: bool = false;

fn stored(value: f32) -> f32 {
  if (ROUND) { return round_bf16(value); }
  return value;
}

fn stored_vec4(value: vec4f) -> vec4f {
  return vec4f(stored(value.x), stored(value.y), stored(value.z), stored(value.w));
}

// To bf16. NaN stays NaN.
fn round_bf16(value: f32) -> f32 {
  let bits = bitcast<u32>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) { return value; }
  return bitcast<f32>((bits + 0x7fffu + ((bits >> 16u) & 1u)) & 0xffff0000u);
}

// Powers of two are handled as their biased exponent: 2^(e - 127). e of 1 to 253, so that the inverse is no subnormal.
fn power_of_two(exponent: u32) -> f32 {
  return bitcast<f32>(exponent << 23u);
}

fn inverse_power_of_two(exponent: u32) -> f32 {
  return bitcast<f32>((254u - exponent) << 23u);
}

// The smallest power of two of at least `value`, which is positive and normal.
fn power_above(value: f32) -> u32 {
  let bits = bitcast<u32>(value);
  return clamp((bits + 0x7fffffu) >> 23u, 1u, 253u);
}

// Scale under which a block with this largest magnitude fits into e4m3 (448) or e2m1 (6).
fn e4m3_scale(largest: f32) -> u32 {
  return power_above(max(largest, 1e-4) * (1.0 / 448.0));
}

fn e2m1_scale(largest: f32) -> u32 {
  return power_above(max(largest, 7.05296610e-38) * (1.0 / 6.0)); // 6 · 2^-126
}

// To e4m3: 3 bits after the point, multiples of 2^-9 below 2^-6, at most 448.
fn round_e4m3(value: f32) -> f32 {
  let bits = bitcast<u32>(value);
  let magnitude = min(bitcast<f32>(bits & 0x7fffffffu), 448.0);
  let raw = bitcast<u32>(magnitude);
  let normal = bitcast<f32>((raw + 0x7ffffu + ((raw >> 20u) & 1u)) & 0xfff00000u);
  let rounded = select(normal, round(magnitude * 512.0) * 0.001953125, magnitude < 0.015625);
  return bitcast<f32>(bitcast<u32>(rounded) | (bits & 0x80000000u));
}

// To e2m1: 0, 0.5, 1, 1.5, 2, 3, 4, 6.
fn round_e2m1(value: f32) -> f32 {
  let bits = bitcast<u32>(value);
  let magnitude = min(bitcast<f32>(bits & 0x7fffffffu), 6.0);
  let raw = bitcast<u32>(magnitude);
  let normal = bitcast<f32>((raw + 0x1fffffu + ((raw >> 22u) & 1u)) & 0xffc00000u);
  let rounded = select(normal, round(magnitude * 2.0) * 0.5, magnitude < 1.0);
  return bitcast<f32>(bitcast<u32>(rounded) | (bits & 0x80000000u));
}
