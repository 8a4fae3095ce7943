// Number formats of the checkpoint, decoded on the device. Only integer arithmetic and exact multiplications by
// powers of two: f32 and f16 subnormals may be flushed to zero by a GPU, so none is ever formed.

// The lower bf16 of a word.
fn decode_bf16(word: u32) -> f32 {
  return bitcast<f32>(word << 16u);
}

// The lowest e4m3 byte of a word: (-1)^s · significand · 2^(max(e, 1) - 10). The two NaN codes decode as ±480; the
// loader does not let them through.
fn decode_e4m3(word: u32) -> f32 {
  let exponent = (word >> 3u) & 15u;
  let significand = (word & 7u) | select(8u, 0u, exponent == 0u);
  let power = bitcast<f32>((max(exponent, 1u) + 117u) << 23u);
  let magnitude = f32(significand) * power;
  return bitcast<f32>(bitcast<u32>(magnitude) | ((word & 0x80u) << 24u));
}

// Twice the lowest e2m1 nibble of a word: an integer of -12 to 12. Callers halve the block's scale instead.
fn decode_e2m1_doubled(word: u32) -> f32 {
  // Digit c of the constant is twice the magnitude of code c: 0, 1, 2, 3, 4, 6, 8, 12.
  let magnitude = (0xc8643210u >> ((word & 7u) << 2u)) & 15u;
  return bitcast<f32>(bitcast<u32>(f32(magnitude)) | ((word & 8u) << 28u));
}

// An e8m0 byte: 2^(byte - 127). Byte 0 (2^-127, a subnormal) decodes as 0.
fn decode_e8m0(byte: u32) -> f32 {
  return bitcast<f32>(byte << 23u);
}
