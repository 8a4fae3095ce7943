"""Write a trained run as a checkpoint in the official DeepSeek-V4 formats, with sample conversations and golden logits.

`python export.py --run DIR --out DIR [--experts mxfp4|nvfp4|fp8|bf16]`. The samples' answers are greedy, made by reference.py
in float64 from the *stored* (quantised) weights, and kept only where every choice leads its runner-up by MARGIN logits,
so that any correct engine gives the same tokens.
"""
import argparse, json, os, random, shutil, numpy as np, torch
from safetensors.torch import save_file
import reference as R

E2M1 = np.array([0, .5, 1, 1.5, 2, 3, 4, 6])
def nibbles(x): return (np.abs(x)[..., None] == E2M1).argmax(-1).astype(np.uint8) | (np.signbit(x).astype(np.uint8) << 3)
def pack(n): return (n[..., 0::2] | (n[..., 1::2] << 4)).astype(np.uint8)
def round_e2m1(a): return R.e2m1(np.clip(a, -6, 6)).astype(np.float64)

def mxfp4(w):
    """[out,in] -> packed e2m1 [out,in/2], e8m0 bytes [out,in/32], dequantised f64."""
    o, i = w.shape; s = w.reshape(o, i // 32, 32); k = np.ceil(np.log2(np.maximum(np.abs(s).max(-1, keepdims=True), 2.0 ** -100) / 6)); sc = 2.0 ** k
    q = round_e2m1(s / sc); return pack(nibbles(q.reshape(o, i))), (k[..., 0] + 127).astype(np.uint8), (q * sc).reshape(o, i)
def nvfp4(w, g=None):
    """[out,in] -> packed e2m1, e4m3 block scales [out,in/16], f32 global scale, dequantised f64."""
    o, i = w.shape; s = w.reshape(o, i // 16, 16); g = g or np.float32(np.abs(w).max() / (6 * 448))
    b = np.abs(s).max(-1, keepdims=True) / 6 / g; bt = torch.tensor(b).float().clamp(2 ** -9, 448).to(torch.float8_e4m3fn); bv = bt.float().numpy().astype(np.float64)
    q = round_e2m1(s / (bv * g)); return pack(nibbles(q.reshape(o, i))), bt[..., 0].contiguous(), g, (q * bv * np.float64(g)).reshape(o, i)
def fp8(w):
    """[out,in] -> e4m3 bytes, e8m0 scale bytes per 128x128 block, dequantised f64."""
    o, i = w.shape; O, I = -(-o // 128), -(-i // 128); p = np.zeros((O * 128, I * 128)); p[:o, :i] = w; s = p.reshape(O, 128, I, 128)
    k = np.ceil(np.log2(np.maximum(np.abs(s).max((1, 3), keepdims=True), 1e-12) / 448)); sc = 2.0 ** k
    q = torch.tensor(s / sc).to(torch.float8_e4m3fn); v = (q.double().numpy() * sc).reshape(O * 128, I * 128)[:o, :i]
    return q.view(torch.uint8).numpy().reshape(O * 128, I * 128)[:o, :i].copy(), (k[:, 0, :, 0] + 127).astype(np.uint8), v
FP8 = ("attn.wq_a.weight", "attn.wq_b.weight", "attn.wkv.weight", "attn.wo_a.weight", "attn.wo_b.weight", "indexer.wq_b.weight", "e_proj.weight", "h_proj.weight")

def encode_weights(W, experts):
    """Official name -> f64 array. Returns (tensors to store, dequantised values that a reference must use)."""
    T, D = {}, {}
    e8m0 = lambda s: torch.tensor(s).view(torch.float8_e8m0fnu)
    for k, w in W.items():
        if w.dtype == np.int64: T[k] = torch.tensor(w); D[k] = w; continue
        base = k[:-len(".weight")] if k.endswith(".weight") else k
        kind = "f32" if k.endswith((".ape", "attn_sink", "gate.bias")) or "hc_" in k else "bf16"
        if ".experts." in k: kind = "mxfp4" if experts == "nvfp4" and k.startswith("mtp") else experts     # the NVFP4 release leaves the MTP experts alone
        elif (k.endswith(FP8) or "shared_experts" in k) and experts != "bf16": kind = "fp8"
        if kind == "mxfp4": q, s, D[k] = mxfp4(w); T[k] = torch.tensor(q).view(torch.int8); T[base + ".scale"] = e8m0(s)
        elif kind == "fp8": q, s, D[k] = fp8(w); T[k] = torch.tensor(q).view(torch.float8_e4m3fn); T[base + ".scale"] = e8m0(s)
        elif kind == "nvfp4":
            e = base.rsplit(".", 1)[0]; g = None if k.endswith("w2.weight") else np.float32(max(np.abs(W[e + ".w1.weight"]).max(), np.abs(W[e + ".w3.weight"]).max()) / (6 * 448))
            q, s, g, D[k] = nvfp4(w, g); T[k] = torch.tensor(q); T[base + ".weight_scale"] = s; T[base + ".weight_scale_2"] = torch.tensor(np.float32(g)); T[base + ".input_scale"] = torch.tensor(np.float32(0.01))
        else: T[k] = torch.tensor(w).to(torch.float32 if kind == "f32" else torch.bfloat16); D[k] = T[k].double().numpy()
    return {k: v.contiguous() for k, v in T.items()}, D

def stored_config(c, experts):
    c = json.loads(json.dumps(c))
    if experts == "nvfp4": c["quantization_config"] = dict(c["quantization_config"], quant_algo="MIXED_PRECISION", moe_quant_algo="NVFP4", group_size=16)
    elif experts != "mxfp4": c["expert_dtype"] = experts
    if experts == "bf16": c.pop("quantization_config", None)
    return c

def write_golden(path, c, D, ids, note, mode="hp", positions=None):
    m = R.Model(dict(c, mtp=c["num_nextn_predict_layers"] > 0), D, mode); full = m.forward(ids); gap = dict(m.gap); mtp = m.mtp(m.X[:-1], ids[1:]) if c["num_nextn_predict_layers"] and mode == "hp" else None
    pos = positions or sorted({0, 1, 3, 4, 7, 8, 15, 16, 31, 32, 63, 64, 127, 128, 129, 255, 256, 511, 512, len(ids) - 1} & set(range(len(ids)))); s = np.sort(full, -1)
    g = dict(note=note, mode=mode, smallest_lead={k: float('%.3g' % v) for k, v in gap.items() if np.isfinite(v)}, ids=[int(i) for i in ids], argmax=full.argmax(-1).tolist(), margin=[float(x) for x in np.round(s[:, -1] - s[:, -2], 6)], logits={str(p): [float("%.6f" % x) for x in full[p]] for p in pos})
    if mtp is not None: g["mtp_argmax"] = mtp.argmax(-1).tolist(); g["mtp_logits"] = {str(p): [float("%.6f" % x) for x in mtp[p]] for p in pos if p < len(mtp)}
    json.dump(g, open(path, "w")); return full

def greedy(m, prompt, limit=160):
    """-> (ids, smallest margin). Stops after EOS (id 1)."""
    m.reset(); z = m.forward(prompt)[-1]; out, margin = [], 1e9
    while True:
        s = np.sort(z); margin = min(margin, s[-1] - s[-2]); t = int(z.argmax()); out.append(t)
        if t == 1 or len(out) >= limit: return out, margin
        z = m.forward([t])[-1]

def main():
    from tokenizers import Tokenizer
    from tasks import SKILLS, SYSTEMS, tool_use, recall
    from encoding import ENCODING, render
    a = argparse.ArgumentParser(); a.add_argument("--run", required=True); a.add_argument("--out", required=True); a.add_argument("--experts", default="mxfp4"); a.add_argument("--samples", type=int, default=8); a.add_argument("--margin", type=float, default=0.2); a = a.parse_args()
    os.makedirs(a.out, exist_ok=True); here = os.path.dirname(os.path.abspath(__file__)); c = json.load(open(here + "/../../model/nano/config.json")); P = torch.load(a.run + "/train.pt")["P"]
    W = {k: v.numpy() if v.dtype == torch.int64 else v.double().numpy() for k, v in P.items()}; T, D = encode_weights(W, a.experts)
    save_file(T, a.out + "/model.safetensors", metadata={"format": "pt"}); os.chmod(a.out + "/model.safetensors", 0o644); json.dump(stored_config(c, a.experts), open(a.out + "/config.json", "w"), indent=2)
    shutil.copy(a.run + "/tokenizer.json", a.out); json.dump(ENCODING, open(a.out + "/encoding.json", "w"), indent=2, ensure_ascii=False)
    json.dump({"add_bos_token": False, "bos_token": "<｜begin▁of▁sentence｜>", "eos_token": "<｜end▁of▁sentence｜>", "pad_token": "<｜end▁of▁sentence｜>", "model_max_length": c["max_position_embeddings"]}, open(a.out + "/tokenizer_config.json", "w"), indent=2, ensure_ascii=False)
    json.dump({"do_sample": True, "temperature": 1.0, "top_p": 1.0, "bos_token_id": 0, "eos_token_id": 1}, open(a.out + "/generation_config.json", "w"), indent=2)
    tok = Tokenizer.from_file(a.out + "/tokenizer.json"); m = R.Model(c, D); r = random.Random(2024); stats = {}
    for seed in range(7, 107):                                             # a recall conversation on which no choice is closer than an f32 engine can tell apart
        ids = tok.encode("".join(p for p, _ in render(dict(messages=recall(random.Random(seed), 40), tools=None, thinking=False))), add_special_tokens=False).ids; m.reset(); s = np.sort(m.forward(ids), -1)
        print("golden: recall seed", seed, m.gap, (s[:, -1] - s[:, -2]).min(), flush=True)
        if m.gap["route"] > 1e-5 and m.gap["topk"] > 2e-5 and (s[:, -1] - s[:, -2]).min() > 5e-4: break
    else: raise SystemExit("no golden prompt without near ties")
    write_golden(a.out + "/golden.json", c, D, ids, f"nano with {a.experts} experts; a recall conversation")
    if not a.samples: return
    with open(a.out + "/samples.jsonl", "w") as f:
        for skill, _ in SKILLS:
            n = 0; ok = 0; total = 0
            for size in [3, 6, 10, 16, 24, 40][: 6 if skill is recall else 1] * 3:
                for _ in range(a.samples):
                    if total >= 4 * a.samples: break
                    ms = skill(r, size); ms, tools = ms if skill is tool_use else (ms, None); thinking = r.random() < .3; last = len(ms) - 1 - (0 if ms[-1]["role"] == "assistant" else 1)
                    if ms[0]["role"] != "system" and r.random() < .2: ms = [{"role": "system", "content": r.choice(SYSTEMS)}] + ms; last += 1
                    conv = dict(messages=ms[: last + 1], tools=tools, thinking=thinking); parts = render(conv); prompt = "".join(p for p, _ in parts[:-1]); want = parts[-1][0]
                    ids = tok.encode(prompt, add_special_tokens=False).ids; out, margin = greedy(m, ids); text = tok.decode(out, skip_special_tokens=False); good = text == want; total += 1; ok += good
                    if margin < a.margin or n >= a.samples * (4 if skill is recall else 1): continue
                    n += 1; f.write(json.dumps(dict(skill=skill.__name__, correct=good, thinking=thinking, messages=ms[:last], tools=tools, prompt_ids=ids, output_ids=out, output_text=text, margin=round(float(margin), 3)), ensure_ascii=False) + "\n")
            stats[skill.__name__] = dict(kept=n, tried=total, correct=ok); print(skill.__name__, stats[skill.__name__], flush=True)
    json.dump(stats, open(a.out + "/samples.stats.json", "w"), indent=1)
if __name__ == "__main__": main()
