// The order of logits, which are read as bits: NaN and infinities are told apart by integer tests.

// An integer that orders logits as numbers; 0 for NaN and infinities, which are never chosen.
fn key_of(bits: u32) -> u32 {
  if ((bits & 0x7f800000u) == 0x7f800000u) { return 0u; }
  if (bits == 0x80000000u) { return 0x80000000u; } // -0 ties with 0
  return bits ^ select(0x80000000u, 0xffffffffu, bits >> 31u == 1u);
}

fn logit_of(key: u32) -> f32 {
  return bitcast<f32>(key ^ select(0xffffffffu, 0x80000000u, key >> 31u == 1u));
}
