"""Logits of single layers of DeepSeek-V4-Flash at full width, for test/data/golden/flash-layers.json.

    python3 test/reference/flash_layers.py PATH/reference.py > test/data/golden/flash-layers.json

PATH/reference.py is the numpy program that the model description was checked with (section 9.4); its mathematics are
used as they are, in f64. Only its weights are replaced: they are made when they are asked for, as
test/support/flash-layer.ts makes them, since 256 experts in f64 would take 50 GB. A model of one layer needs the whole
prompt only for keys and entries, so experts and head are computed for the listed positions alone.
"""
import importlib.util, json, math, sys
import numpy as np

spec = importlib.util.spec_from_file_location('reference', sys.argv[1])
ref = importlib.util.module_from_spec(spec)
spec.loader.exec_module(ref)

POOL_BYTES = (1 << 24) - 8   # no multiple of a row, so that no two rows of a table are alike
TOKENS, POSITIONS, STRIDE = 300, [0, 127, 200, 299], 1009   # every STRIDE-th logit is listed
FLASH = dict(vocab_size=129280, hidden_size=4096, moe_intermediate_size=2048, num_hidden_layers=1, num_attention_heads=64,
             head_dim=512, qk_rope_head_dim=64, q_lora_rank=1024, o_lora_rank=1024, o_groups=8, num_experts_per_tok=6,
             n_routed_experts=256, routed_scaling_factor=1.5, rope_theta=10000, compress_rope_theta=160000, hc_mult=4,
             hc_sinkhorn_iters=20, hc_eps=1e-6, swiglu_limit=10.0, sliding_window=128, index_n_heads=64, index_head_dim=128,
             index_topk=16, rms_norm_eps=1e-6,
             rope_scaling=dict(factor=16, original_max_position_embeddings=65536, beta_fast=32, beta_slow=1))
KINDS = {'sliding window, hash-routed': (0, 1), 'ratio 4, scored': (4, 0), 'ratio 128, scored': (128, 0)}

def pool():
    x = np.arange(POOL_BYTES // 4, dtype=np.uint64) * np.uint64(0x9E3779B1)
    M = np.uint64(0xffffffff)
    x &= M; x ^= x >> np.uint64(16); x = (x * np.uint64(0x85EBCA6B)) & M
    x ^= x >> np.uint64(13); x = (x * np.uint64(0xC2B2AE35)) & M
    return (x ^ (x >> np.uint64(16))).astype('<u4').view(np.uint8)
POOL = pool()

def stored(name, first, count):
    """`count` bytes of a tensor from byte `first` on: a window of the pool that begins where its name says."""
    start = (ref.fnv(name) % POOL_BYTES) & ~7
    return POOL[(start + first + np.arange(count, dtype=np.int64)) % POOL_BYTES]

E4M3 = np.array([(-1.0 if c & 128 else 1.0) * ((c & 7) * 2.0 ** -9 if c & 120 == 0 else (8 + (c & 7)) * 2.0 ** (((c >> 3) & 15) - 10)) for c in range(256)])
E2M1 = np.array([0, .5, 1, 1.5, 2, 3, 4, 6, -0., -.5, -1, -1.5, -2, -3, -4, -6])

def scales(name, count, expert):
    b = stored(name, 0, count).astype(np.int64)
    return np.exp2((118 + (b & 1) + ((b >> 1) & 1) if expert else 119 + (b & 1)) - 127.0)

def bf16_rows(name, first, count, columns):
    w = stored(name, first * columns * 2, count * columns * 2).view('<u2').astype(np.uint32)
    if 'norm' in name: bits = 0x3f00 | (w & 0x7f)
    else: bits = (w & 0x8000) | (((0x7b if name == 'embed.weight' else 0x75) + ((w >> 7) & 3)) << 7) | (w & 0x7f)
    return (bits << np.uint32(16)).astype(np.uint32).view(np.float32).astype(np.float64).reshape(count, columns)

class Weights:
    """The tensors of reference.Model by name."""
    def __init__(s, c): s.c, s.shapes, s.kept = c, ref.tensor_list(c), {}
    def __getitem__(s, name):
        if '.experts.' in name: return s.make(name)
        if name not in s.kept: s.kept[name] = s.make(name)
        return s.kept[name]
    def make(s, name):
        if name.endswith('tid2eid'):
            return np.array([[(7 * t + 3 * k) % s.c['n_routed_experts'] for k in range(s.c['num_experts_per_tok'])] for t in range(s.c['vocab_size'])])
        shape = s.shapes[name]; base = name.removesuffix('.weight'); last = name.split('.')[-2] if '.' in name else ''
        if name in ('embed.weight', 'head.weight'): return Rows(name, shape)
        if '.experts.' in name:
            rows, columns = shape; b = stored(name, 0, rows * columns // 2)
            v = np.stack([E2M1[b & 15], E2M1[b >> 4]], 1).reshape(rows, columns // 32, 32)
            return (v * scales(base + '.scale', rows * columns // 32, True).reshape(rows, -1, 1)).reshape(shape)
        if last in ('wq_a', 'wq_b', 'wo_a', 'wo_b', 'w1', 'w2', 'w3') or base.endswith('attn.wkv'):
            rows, columns = shape; b = stored(name, 0, rows * columns)
            v = E4M3[(b & 0x80) | (0x28 + (b & 0x1f))].reshape(rows // 128, 128, columns // 128, 128)
            return (v * scales(base + '.scale', rows * columns // 16384, False).reshape(rows // 128, 1, columns // 128, 1)).reshape(shape)
        if name.endswith('.weight'):
            columns = shape[-1]; rows = math.prod(shape) // columns
            return bf16_rows(name, 0, rows, columns).reshape(shape)
        u = stored(name, 0, 4 * math.prod(shape)).view('<u4').astype(np.float64) / 4294967296.0 - 0.5
        if name.endswith('_scale'): v = 1 + 0.5 * u
        elif name.endswith('_fn'): v = 0.05 * u
        elif name.endswith(('ape', 'attn_sink')): v = 2 * u
        elif name.endswith('gate.bias'): v = 0.2 * u
        else: v = u
        return v.astype(np.float32).astype(np.float64).reshape(shape)

class Rows:
    """A table whose rows are made when they are read."""
    def __init__(s, name, shape): s.name, s.shape = name, shape
    def __getitem__(s, ids): return np.concatenate([bf16_rows(s.name, i, 1, s.shape[1]) for i in ids])
    def dot(s, x, block=8192):
        rows = s.shape[0]
        return np.concatenate([x @ bf16_rows(s.name, a, min(block, rows - a), s.shape[1]).T for a in range(0, rows, block)], 1)

class Layer(ref.Model):
    def __init__(s, c):
        super().__init__(c, {})
        s.P = Weights(c)
    def logits(s, ids, positions):
        X = np.repeat(s.P['embed.weight'][ids][:, None], s.c['hc_mult'], 1); p = 'layers.0.'
        y, post, C = s.hc_pre(X, p + 'hc_attn_'); X = s.hc_post(s.attn(s.rms(y, p + 'attn_norm.weight'), 0), X, post, C)
        X, ids = X[positions], [ids[t] for t in positions]
        y, post, C = s.hc_pre(X, p + 'hc_ffn_'); X = s.hc_post(s.moe(s.rms(y, p + 'ffn_norm.weight'), ids, 0), X, post, C)
        x = X.reshape(len(X), -1)
        m = (x @ s.P['hc_head_fn'].T) / np.sqrt((x * x).mean(-1, keepdims=True) + s.c['rms_norm_eps'])
        pre = 1 / (1 + np.exp(-(m * s.P['hc_head_scale'] + s.P['hc_head_base']))) + s.c['hc_eps']
        return s.P['head.weight'].dot(s.rms((pre[..., None] * X).sum(1), 'norm.weight'))

def main():
    ids = ref.golden_ids(TOKENS, FLASH['vocab_size']); kinds = {}
    for name, (ratio, hashed) in KINDS.items():
        layer = Layer(dict(FLASH, compress_ratios=[ratio, 0], num_hash_layers=hashed)); rows = layer.logits(ids, POSITIONS)
        top = np.sort(rows, 1)
        kinds[name] = dict(ratio=ratio, hash=bool(hashed), argmax=[int(v) for v in rows.argmax(1)], margin=[float(v) for v in top[:, -1] - top[:, -2]],
                           lead={k: (None if np.isinf(v) else float(v)) for k, v in layer.gap.items()},
                           logits=[[round(float(v), 7) for v in row[::STRIDE]] for row in rows])
        print(name, 'largest logit', float(np.abs(rows).max()), 'std', float(rows.std()), 'leads', layer.gap, file=sys.stderr)
    out = dict(tokens=TOKENS, positions=POSITIONS, stride=STRIDE, index_topk=FLASH['index_topk'], kinds=kinds)
    print(json.dumps(out, separators=(',', ':')))

main()
