// How the keys of the lightning indexer are stored. A key is a run of words: its elements packed from the lowest bits
// up, then the scales of its blocks. The file that includes it declares the binding `keys`.

const PRECISION: u32 = KEYS_F32;

const KEYS_F32: u32 = 0u;
const KEYS_BF16: u32 = 1u;
const KEYS_FP8: u32 = 2u; // e4m3, then one f32: the scale of the key
const KEYS_FP4: u32 = 3u; // e2m1, then one e8m0 byte for each block

// Elements in a word, elements under one scale, by precision.
const KEY_ELEMENTS = array<u32, 4>(1u, 2u, 4u, 8u)[PRECISION];
const KEY_BLOCK = array<u32, 4>(0x80000000u, 0x80000000u, 0x80000000u, 32u)[PRECISION];

// Words of the elements of a key, and of a whole key.
fn element_words(width: u32) -> u32 {
  return (width + KEY_ELEMENTS - 1u) / KEY_ELEMENTS;
}

fn key_words(width: u32) -> u32 {
  if (PRECISION == KEYS_FP8) { return element_words(width) + 1u; }
  if (PRECISION == KEYS_FP4) { return element_words(width) + ((width + 31u) / 32u + 3u) / 4u; }
  return element_words(width);
}
