// What the rules of a row do to one token's logit: written on the host (kernels/rules.ts), read by rules and logprobs.

struct Edit {
  token: u32,
  seen: u32, // how often it was generated, and flags
  bias: f32,
  raw: u32, // written: the bits of the logit before the edit
}
