"""Independent numpy reference for DeepSeek-V4 inference, written from the model's description alone (from no other source).
mode 'hp'  : float64/float32 high precision, no fake quantisation (comparable with HF transformers in fp32)
mode 'bf16q': emulates the rounding points of DeepSeek's reference (bf16 activations, KV fp8-64 / index fp4-32 fake quant)
Weights: dict of arrays under the OFFICIAL tensor names (already dequantised).
"""
import math, numpy as np

def fnv(name):
    h = 2166136261
    for b in name.encode(): h = ((h ^ b) * 16777619) & 0xffffffff
    return h

def hash_uniform(name, n):
    """n deterministic numbers in [-0.5, 0.5)"""
    x = (np.uint64(fnv(name)) + np.arange(n, dtype=np.uint64) * np.uint64(0x9E3779B1)) & np.uint64(0xffffffff)
    M = np.uint64(0xffffffff)
    x ^= x >> np.uint64(16); x = (x * np.uint64(0x85EBCA6B)) & M
    x ^= x >> np.uint64(13); x = (x * np.uint64(0xC2B2AE35)) & M
    x ^= x >> np.uint64(16)
    return x.astype(np.float64) / 4294967296.0 - 0.5

def tensor_list(c):
    D, H, hd, ql = c['hidden_size'], c['num_attention_heads'], c['head_dim'], c['q_lora_rank']
    g, ol, I, E, V, n = c['o_groups'], c['o_lora_rank'], c['moe_intermediate_size'], c['n_routed_experts'], c['vocab_size'], c['hc_mult']
    ih, idm = c['index_n_heads'], c['index_head_dim']
    t = {'embed.weight': (V, D), 'head.weight': (V, D), 'norm.weight': (D,),
         'hc_head_fn': (n, n * D), 'hc_head_base': (n,), 'hc_head_scale': (1,)}
    if c.get('mtp'):
        t.update({'mtp.0.e_proj.weight': (D, D), 'mtp.0.h_proj.weight': (D, D), 'mtp.0.enorm.weight': (D,), 'mtp.0.hnorm.weight': (D,), 'mtp.0.norm.weight': (D,),
                  'mtp.0.hc_head_fn': (n, n * D), 'mtp.0.hc_head_base': (n,), 'mtp.0.hc_head_scale': (1,)})
    for l in range(c['num_hidden_layers'] + bool(c.get('mtp'))):
        p, r = (f'layers.{l}.', c['compress_ratios'][l]) if l < c['num_hidden_layers'] else ('mtp.0.', 0)
        t[p + 'attn_norm.weight'] = (D,); t[p + 'ffn_norm.weight'] = (D,)
        for s in ('attn', 'ffn'):
            t[p + f'hc_{s}_fn'] = ((2 + n) * n, n * D); t[p + f'hc_{s}_base'] = ((2 + n) * n,); t[p + f'hc_{s}_scale'] = (3,)
        a = p + 'attn.'
        t.update({a + 'wq_a.weight': (ql, D), a + 'q_norm.weight': (ql,), a + 'wq_b.weight': (H * hd, ql), a + 'wkv.weight': (hd, D),
                  a + 'kv_norm.weight': (hd,), a + 'attn_sink': (H,), a + 'wo_a.weight': (g * ol, H * hd // g), a + 'wo_b.weight': (D, g * ol)})
        if r:
            k = 2 if r == 4 else 1
            t.update({a + 'compressor.ape': (r, k * hd), a + 'compressor.wkv.weight': (k * hd, D), a + 'compressor.wgate.weight': (k * hd, D),
                      a + 'compressor.norm.weight': (hd,)})
        if r == 4:
            i = a + 'indexer.'
            t.update({i + 'wq_b.weight': (ih * idm, ql), i + 'weights_proj.weight': (ih, D), i + 'compressor.ape': (4, 2 * idm),
                      i + 'compressor.wkv.weight': (2 * idm, D), i + 'compressor.wgate.weight': (2 * idm, D), i + 'compressor.norm.weight': (idm,)})
        f = p + 'ffn.'
        t[f + 'gate.weight'] = (E, D)
        if l >= c['num_hash_layers']: t[f + 'gate.bias'] = (E,)
        for e in [f'experts.{e}' for e in range(E)] + ['shared_experts']:
            t[f + e + '.w1.weight'] = (I, D); t[f + e + '.w3.weight'] = (I, D); t[f + e + '.w2.weight'] = (D, I)
    return t

def golden_weights(c):
    W = {}
    for name, shp in tensor_list(c).items():
        u = hash_uniform(name, int(np.prod(shp))).reshape(shp)
        if 'norm' in name: v = 1 + 0.5 * u
        elif name.endswith('_scale'): v = 1 + 0.5 * u
        elif name.endswith(('_base', 'gate.bias')): v = u
        elif name.endswith('_fn'): v = 0.4 * u
        elif name.endswith(('ape', 'attn_sink', 'embed.weight')): v = 2 * u
        else: v = 4 * u / math.sqrt(shp[-1])
        W[name] = v.astype(np.float32)
    for l in range(c['num_hash_layers']):
        W[f'layers.{l}.ffn.gate.tid2eid'] = np.array([[(7 * t + 3 * s) % c['n_routed_experts'] for s in range(c['num_experts_per_tok'])]
                                                      for t in range(c['vocab_size'])], dtype=np.int64)
    return W

# ---------- number formats
def bf16(x):
    u = np.ascontiguousarray(x, np.float32).view(np.uint32).astype(np.uint64)
    return (((u + 0x7fff + ((u >> 16) & 1)) & 0xffff0000).astype(np.uint32)).view(np.float32).reshape(np.shape(x))

def pow2_ceil_scale(amax, inv_max):
    v = np.float32(amax) * np.float32(inv_max)
    m, e = np.frexp(v)                       # v = m*2^e, m in [0.5,1)
    return np.ldexp(np.float32(1), np.where(m == 0.5, e - 1, e))

def e4m3(x):                                  # RNE, |x|<=448 assumed
    a = np.abs(x).astype(np.float64); e = np.floor(np.log2(np.maximum(a, 2.0 ** -20)))
    step = np.exp2(np.maximum(e, -6) - 3); return (np.sign(x) * np.rint(a / step) * step).astype(np.float32)

def e2m1(x):                                  # RNE on {0,.5,1,1.5,2,3,4,6}
    a = np.abs(x).astype(np.float64); e = np.floor(np.log2(np.maximum(a, 2.0 ** -20)))
    step = np.exp2(np.maximum(e, 0) - 1); return (np.sign(x) * np.minimum(np.rint(a / step) * step, 6)).astype(np.float32)

def fake_fp8(x, blk):
    s = x.reshape(*x.shape[:-1], -1, blk); sc = pow2_ceil_scale(np.maximum(np.abs(s).max(-1, keepdims=True), np.float32(1e-4)), 1 / 448)
    return bf16(e4m3(np.clip(s / sc, -448, 448)) * sc).reshape(x.shape)

def fake_fp4(x, blk=32):
    s = x.reshape(*x.shape[:-1], -1, blk); sc = pow2_ceil_scale(np.maximum(np.abs(s).max(-1, keepdims=True), np.float32(6 * 2.0 ** -126)), 1 / 6)
    return bf16(e2m1(np.clip(s / sc, -6, 6)) * sc).reshape(x.shape)

def hadamard(x):
    n = x.shape[-1]; y = x.reshape(-1, n).copy(); h = 1
    while h < n:
        z = y.reshape(-1, n // (2 * h), 2, h); y = np.stack([z[:, :, 0] + z[:, :, 1], z[:, :, 0] - z[:, :, 1]], 2).reshape(-1, n); h *= 2
    return (y * n ** -0.5).reshape(x.shape)

class Model:
    def __init__(s, c, W, mode='hp', dt=np.float64):
        s.c, s.W, s.q = c, W, mode == 'bf16q'
        s.dt = np.float32 if s.q else dt
        s.r = bf16 if s.q else (lambda x: x)
        s.P = {k: (v if v.dtype == np.int64 else v.astype(s.dt)) for k, v in W.items()}
        for k in list(s.P):                                  # the MTP block is addressed as layer index num_hidden_layers
            if k.startswith('mtp.0.'): s.P[f"layers.{c['num_hidden_layers']}." + k[6:]] = s.P[k]
        s.ratio = list(c['compress_ratios'][:c['num_hidden_layers']]) + [0]
        rd = c['qk_rope_head_dim']
        base = lambda th: 1.0 / (th ** (np.arange(0, rd, 2) / rd))
        s.f_main = base(c['rope_theta'])
        f = base(c['compress_rope_theta']); y = c.get('rope_scaling')
        if y:
            cd = lambda nrot: rd * math.log(y['original_max_position_embeddings'] / (nrot * 2 * math.pi)) / (2 * math.log(c['compress_rope_theta']))
            lo, hi = max(math.floor(cd(y['beta_fast'])), 0), min(math.ceil(cd(y['beta_slow'])), rd - 1)
            ramp = np.clip((np.arange(rd // 2) - lo) / ((hi - lo) or 0.001), 0, 1)
            f = f / y['factor'] * ramp + f * (1 - ramp)
        s.f_comp = f
        s.reset()

    def reset(s):
        s.pos = s.mtp_pos = 0; s.st = []; s.gap = {'route': np.inf, 'topk': np.inf}   # smallest lead of a chosen expert or entry over the best one left out
        for r in s.ratio:
            st = {'win': []}
            if r: st['main'] = {'tok': [], 'ent': []}      # tok: trailing raw (kv, score+ape) rows still needed
            if r == 4: st['idx'] = {'tok': [], 'ent': []}
            s.st.append(st)

    def lin(s, x, name): return s.r(x @ s.P[name + '.weight'].T)
    def rms(s, x, w): 
        x = x.astype(s.dt); return s.r(s.P[w] * (x / np.sqrt((x * x).mean(-1, keepdims=True) + s.c['rms_norm_eps'])))
    def rope(s, x, pos, f, inv=False):                      # x [..., dim], pos broadcastable to x.shape[:-1]
        rd = s.c['qk_rope_head_dim']; a = (np.asarray(pos, np.float32)[..., None] * f.astype(np.float32)).astype(np.float64)   # the product is rounded to f32, as the official code does
        cs, sn = np.cos(a).astype(s.dt), np.sin(a).astype(s.dt)
        if inv: sn = -sn
        y = x.copy(); e, o = x[..., -rd::2], x[..., -rd + 1::2]
        y[..., -rd::2] = s.r(e * cs - o * sn); y[..., -rd + 1::2] = s.r(e * sn + o * cs); return y

    def hc_pre(s, X, p):                                    # X [S,n,D]
        n = s.c['hc_mult']; x = X.reshape(len(X), -1).astype(s.dt)
        m = (x @ s.P[p + 'fn'].T) / np.sqrt((x * x).mean(-1, keepdims=True) + s.c['rms_norm_eps'])
        sc, b, eps = s.P[p + 'scale'], s.P[p + 'base'], s.c['hc_eps']; sg = lambda z: 1 / (1 + np.exp(-z))
        pre = sg(m[:, :n] * sc[0] + b[:n]) + eps; post = 2 * sg(m[:, n:2 * n] * sc[1] + b[n:2 * n])
        C = (m[:, 2 * n:] * sc[2] + b[2 * n:]).reshape(-1, n, n); C = np.exp(C - C.max(-1, keepdims=True)); C = C / C.sum(-1, keepdims=True) + eps
        C = C / (C.sum(1, keepdims=True) + eps)
        for _ in range(s.c['hc_sinkhorn_iters'] - 1):
            C = C / (C.sum(2, keepdims=True) + eps); C = C / (C.sum(1, keepdims=True) + eps)
        return s.r((pre[..., None] * X).sum(1)), post, C
    def hc_post(s, y, X, post, C):                          # out[j] = post[j]*y + sum_i C[i,j]*X[i]
        return s.r(post[..., None] * y[:, None] + np.einsum('sij,sid->sjd', C, X.astype(s.dt)))

    def compress(s, x, l, key, ratio):                      # append tokens of this chunk, emit finished entries
        a = f'layers.{l}.attn.' + ('indexer.' if key == 'idx' else '') + 'compressor.'
        st = s.st[l][key]; d = s.c['index_head_dim'] if key == 'idx' else s.c['head_dim']; ov = ratio == 4
        kv = x.astype(s.dt) @ s.P[a + 'wkv.weight'].T; sc = x.astype(s.dt) @ s.P[a + 'wgate.weight'].T
        vis = []
        for i in range(len(x)):
            t = s.pos + i; st['tok'].append((kv[i], sc[i] + s.P[a + 'ape'][t % ratio]))
            if (t + 1) % ratio == 0:
                cur = st['tok'][-ratio:]; prev = st['tok'][-2 * ratio:-ratio] if ov else []
                K = np.stack([k[:d] for k, _ in prev] + [k[-d:] for k, _ in cur]); Z = np.stack([z[:d] for _, z in prev] + [z[-d:] for _, z in cur])
                P = np.exp(Z - Z.max(0)); P /= P.sum(0); e = s.rms(s.r((K * P).sum(0)), a + 'norm.weight')
                e = s.rope(e, t + 1 - ratio, s.f_comp)
                if key == 'idx': e = s.r(hadamard(e)); e = fake_fp4(e) if s.q else e
                elif s.q: nd = d - s.c['qk_rope_head_dim']; e = np.concatenate([fake_fp8(e[:nd], 64), e[nd:]])
                st['ent'].append(e); st['tok'] = st['tok'][-ratio:] if ov else []
            vis.append(len(st['ent']))
        return vis                                          # number of visible entries per query

    def attn(s, x, l):
        c = s.c; a = f'layers.{l}.attn.'; S = len(x); H, hd, rd = c['num_attention_heads'], c['head_dim'], c['qk_rope_head_dim']
        ratio = s.ratio[l]; f = s.f_comp if ratio else s.f_main; pos = s.pos + np.arange(S)
        qr = s.rms(s.lin(x, a + 'wq_a'), a + 'q_norm.weight')
        q = s.lin(qr, a + 'wq_b').reshape(S, H, hd)
        q = s.r(q * s.r(1 / np.sqrt(s.r(s.r(s.r(q * q).mean(-1, keepdims=True)) + np.asarray(c['rms_norm_eps'], s.dt)))))
        q = s.rope(q, pos[:, None], f)
        kv = s.rope(s.rms(s.lin(x, a + 'wkv'), a + 'kv_norm.weight'), pos, f)
        if s.q: kv = np.concatenate([fake_fp8(kv[:, :hd - rd], 64), kv[:, hd - rd:]], 1)
        sel = [[]] * S
        if ratio:
            vis = s.compress(x, l, 'main', ratio); sel = [range(v) for v in vis]
        if ratio == 4:
            s.compress(x, l, 'idx', 4); K = np.array(s.st[l]['idx']['ent']).reshape(-1, c['index_head_dim']); n, di = c['index_n_heads'], c['index_head_dim']
            iq = s.rope(s.lin(qr, a + 'indexer.wq_b').reshape(S, n, di), pos[:, None], f); iq = s.r(hadamard(iq)); iq = fake_fp4(iq) if s.q else iq
            w = s.r(s.lin(x, a + 'indexer.weights_proj') * (di ** -0.5 * n ** -0.5))
            for i in range(S):
                if vis[i] > c['index_topk']:
                    sc = s.r((s.r(np.maximum(s.r(K[:vis[i]] @ iq[i].T), 0) * w[i])).sum(1))
                    order = np.argsort(-sc, kind='stable'); sel[i] = order[:c['index_topk']]; s.gap['topk'] = min(s.gap['topk'], sc[order[c['index_topk'] - 1]] - sc[order[c['index_topk']]])
        o = np.zeros((S, H, hd), s.dt); win = s.st[l]['win']; ent = s.st[l]['main']['ent'] if ratio else None
        for i in range(S):
            win.append(kv[i]); del win[:-c['sliding_window']]
            Kv = np.stack(win + [ent[j] for j in sel[i]]).astype(s.dt)
            z = q[i].astype(s.dt) @ Kv.T * hd ** -0.5; sink = s.P[a + 'attn_sink'][:, None]
            m = z.max(-1, keepdims=True); p = np.exp(z - m); o[i] = s.r(p) @ Kv / (p.sum(-1, keepdims=True) + np.exp(sink - m))
        o = s.rope(s.r(o), pos[:, None], f, inv=True); g = c['o_groups']
        A = s.P[a + 'wo_a.weight'].reshape(g, c['o_lora_rank'], -1)
        return s.lin(s.r(np.einsum('sgd,grd->sgr', o.reshape(S, g, -1), A)).reshape(S, -1), a + 'wo_b')

    def expert(s, x, p, w=None):
        L = s.c['swiglu_limit']; g = np.minimum(s.lin(x, p + '.w1'), L); u = np.clip(s.lin(x, p + '.w3'), -L, L)
        h = g / (1 + np.exp(-g)) * u; h = h if w is None else w * h
        return s.lin(s.r(h), p + '.w2')
    def moe(s, x, ids, l):
        c = s.c; p = f'layers.{l}.ffn.'; sc = np.sqrt(np.logaddexp(0, x.astype(s.dt) @ s.P[p + 'gate.weight'].T)); k = c['num_experts_per_tok']; y = np.zeros(x.shape, s.dt)
        for i in range(len(x)):
            if l < c['num_hash_layers']: idx = s.P[p + 'gate.tid2eid'][ids[i]]
            else: b = sc[i] + s.P[p + 'gate.bias']; order = np.argsort(-b, kind='stable'); idx = order[:k]; s.gap['route'] = min(s.gap['route'], b[order[k - 1]] - b[order[k]])
            w = sc[i][idx]; w = w / w.sum() * c['routed_scaling_factor']
            for e, we in sorted(zip(idx, w)): y[i] += s.expert(x[i], p + f'experts.{e}', we)
        return s.r(y + s.expert(x, p + 'shared_experts'))

    def block(s, X, ids, l):
        p = f'layers.{l}.'
        y, post, C = s.hc_pre(X, p + 'hc_attn_'); X = s.hc_post(s.attn(s.rms(y, p + 'attn_norm.weight'), l), X, post, C)
        y, post, C = s.hc_pre(X, p + 'hc_ffn_'); return s.hc_post(s.moe(s.rms(y, p + 'ffn_norm.weight'), ids, l), X, post, C)
    def head(s, X, p=''):
        x = X.reshape(len(X), -1).astype(s.dt)
        m = (x @ s.P[p + 'hc_head_fn'].T) / np.sqrt((x * x).mean(-1, keepdims=True) + s.c['rms_norm_eps'])
        pre = 1 / (1 + np.exp(-(m * s.P[p + 'hc_head_scale'] + s.P[p + 'hc_head_base']))) + s.c['hc_eps']
        return s.rms(s.r((pre[..., None] * X).sum(1)), p + 'norm.weight') @ s.P['head.weight'].T
    def forward(s, ids):
        X = np.repeat(s.r(s.P['embed.weight'][ids])[:, None], s.c['hc_mult'], 1)
        for l in range(s.c['num_hidden_layers']): X = s.block(X, ids, l)
        s.pos += len(ids); s.X = X                           # s.X: pre-head streams, the MTP input
        return s.head(X)
    def mtp(s, X, next_ids):                                 # X[t]: streams at t, next_ids[t]: token t+1 -> logits for token t+2
        e = s.lin(s.rms(s.r(s.P['embed.weight'][next_ids]), 'mtp.0.enorm.weight'), 'mtp.0.e_proj')
        X = s.r(e[:, None] + s.lin(s.rms(X, 'mtp.0.hnorm.weight'), 'mtp.0.h_proj'))
        keep, s.pos = s.pos, s.mtp_pos
        X = s.block(X, next_ids, s.c['num_hidden_layers']); s.mtp_pos, s.pos = s.pos + len(X), keep; s.mtpX = X
        return s.head(X, 'mtp.0.')

TINY = dict(vocab_size=256, hidden_size=64, moe_intermediate_size=32, num_hidden_layers=6, num_attention_heads=4, head_dim=32, qk_rope_head_dim=8,
            q_lora_rank=32, num_experts_per_tok=2, n_routed_experts=8, routed_scaling_factor=1.5, rope_theta=10000.0, compress_rope_theta=160000.0,
            compress_ratios=[0, 4, 16, 4, 16, 4], hc_mult=4, hc_sinkhorn_iters=20, hc_eps=1e-6, num_hash_layers=2, swiglu_limit=0.5, sliding_window=16,
            o_groups=2, o_lora_rank=16, index_n_heads=32, index_head_dim=16, index_topk=8, rms_norm_eps=1e-6,
            rope_scaling=dict(factor=16, original_max_position_embeddings=64, beta_fast=32, beta_slow=1))
def golden_ids(n, V): return [(i * i * 31 + i * 17 + 5) % V for i in range(n)]

if __name__ == '__main__':
    m = Model(TINY, golden_weights(TINY)); ids = golden_ids(160, 256); full = m.forward(ids)
    m.reset(); a = [m.forward(ids[:37])]; [a.append(m.forward([t])) for t in ids[37:]]
    print('incremental vs full', np.abs(np.concatenate(a) - full).max(), 'absmax', np.abs(full).max())
    for p in (0, 3, 4, 15, 16, 31, 36, 63, 64, 100, 127, 128, 159):
        print(p, [f'{v:.6f}' for v in full[p, :4]], int(full[p].argmax()), f'{full[p].max():.6f}')
