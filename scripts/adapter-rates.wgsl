// What an adapter can do at best, for scripts/adapter-rates.ts. `copy`: a lane moves 16 bytes, bound by memory.
// `multiply_add`: a lane advances CHAINS independent vectors in registers, bound by arithmetic; memory is touched once.

struct Params {
  count: u32, // copy: vectors of 16 bytes; multiply_add: lanes
  lanes_per_row: u32, // lanes of the grid in x
  iterations: u32,
  factor: f32,
  addend: f32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> source: array<vec4u>;
@group(0) @binding(2) var<storage, read_write> copied: array<vec4u>;
@group(0) @binding(3) var<storage, read_write> sums: array<f32>;

const CHAINS: u32 = 4u;
const REPEATS: u32 = 8u; // of one iteration, to spread the loop's own cost

@compute @workgroup_size(64)
fn copy(@builtin(global_invocation_id) id: vec3u) {
  let index = id.y * params.lanes_per_row + id.x;
  if (index >= params.count) { return; }
  copied[index] = source[index];
}

@compute @workgroup_size(64)
fn multiply_add(@builtin(global_invocation_id) id: vec3u) {
  if (id.x >= params.count) { return; }
  // Start values differ, or the compiler would compute equal chains once. All of them converge to 1: no infinities, and
  // no denormal numbers, which some processors are slow at.
  var chain: array<vec4f, CHAINS>;
  for (var i = 0u; i < CHAINS; i++) { chain[i] = vec4f(0.0, 0.25, 0.5, 0.75) + f32(i + id.x % 64u) / 64.0; }
  for (var iteration = 0u; iteration < params.iterations; iteration++) {
    for (var repeat = 0u; repeat < REPEATS; repeat++) {
      for (var i = 0u; i < CHAINS; i++) { chain[i] = chain[i] * params.factor + params.addend; }
    }
  }
  var sum = vec4f();
  for (var i = 0u; i < CHAINS; i++) { sum += chain[i]; }
  sums[id.x] = dot(sum, vec4f(1.0));
}
