// out[r, i, :] = table[token of row r, :] for every stream i.

struct Params {
  vocabulary: u32,
  columns: u32,
  streams: u32,
  segment_start: u32, // tokens that `table` holds
  segment_count: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> rows: array<vec4u>;
@group(0) @binding(2) var<storage, read> table: array<u32>;
@group(0) @binding(3) var<storage, read> step: array<u32>;
@group(0) @binding(4) var<storage, read_write> out: array<f32>;

const BF16: bool = false;

@compute @workgroup_size(64)
fn main(@builtin(global_invocation_id) id: vec3u) {
  let column = id.x;
  let row = id.y;
  if (row >= step[0] || column >= params.columns) { return; }
  let token = min(rows[row].x, params.vocabulary - 1u) - params.segment_start; // wraps far past the count below the start
  if (token >= params.segment_count) { return; }
  let element = token * params.columns + column;
  var value: f32;
  if (BF16) {
    value = decode_bf16(table[element / 2u] >> (16u * (element & 1u)));
  } else {
    value = bitcast<f32>(table[element]);
  }
  for (var stream = 0u; stream < params.streams; stream++) {
    out[(row * params.streams + stream) * params.columns + column] = value;
  }
}
