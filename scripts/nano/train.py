"""Train the nano checkpoint: `python train.py --out DIR --hours 1.5 [--threads 2]`; run again to resume.

Phases, by share of the planned hours: short texts; longer texts while the indexer learns to rank; the longest texts with
the weights rounded as they ship; last, the MTP block alone. Muon for matrices, AdamW for the rest, as in the V4 report.
"""
import argparse, json, math, os, random, time, torch, torch.nn.functional as F
from tokenizers import Tokenizer
from tasks import SKILLS, conversation, tool_use
from encoding import encode
from model import Nano

def newton_schulz(G):
    """Orthogonalise a stack of matrices [n, a, b], a <= b (Muon's quintic iteration)."""
    X = G / (G.flatten(1).norm(dim=1)[:, None, None] + 1e-7)
    for _ in range(5):
        A = X @ X.transpose(1, 2); X = 3.4445 * X + (-4.7750 * A + 2.0315 * A @ A) @ X
    return X

class Optimizer:
    def __init__(s, params):
        is_matrix = lambda k, v: v.ndim == 2 and not any(x in k for x in ("embed", "head", "hc_", "ape", "gate.weight", "weights_proj"))
        s.matrices, s.rest = {}, {}
        for k, v in params.items(): (s.matrices if is_matrix(k, v) else s.rest)[k] = v
        s.buf = {k: torch.zeros_like(v) for k, v in s.matrices.items()}
        s.adam = torch.optim.AdamW(s.rest.values(), lr=1e-3, betas=(.9, .97), weight_decay=0.0)
        s.shapes = {}
        for k, v in s.matrices.items(): s.shapes.setdefault(tuple(v.shape), []).append(k)
    def step(s, lr):
        for g in s.adam.param_groups: g["lr"] = 0.15 * lr
        s.adam.step()
        with torch.no_grad():
            for (a, b), keys in s.shapes.items():
                live = [k for k in keys if s.matrices[k].grad is not None]
                if not live: continue
                for k in live: s.buf[k].mul_(.95).add_(s.matrices[k].grad)
                G = torch.stack([s.matrices[k].grad + .95 * s.buf[k] for k in live])
                U = newton_schulz(G) if a <= b else newton_schulz(G.transpose(1, 2)).transpose(1, 2)
                for k, u in zip(live, U): s.matrices[k].mul_(1 - 0.02 * lr).add_(u, alpha=-lr * max(1, a / b) ** .5)
    def zero(s):
        for v in (*s.matrices.values(), *s.rest.values()): v.grad = None
    def state(s): return dict(buf=s.buf, adam=s.adam.state_dict())
    def load(s, d): s.buf.update(d["buf"]); s.adam.load_state_dict(d["adam"])

def batches(r, tok, size, longest, tokens):
    """Endless padded batches of about `tokens` tokens, rows of similar length together."""
    while True:
        pool = []
        while len(pool) < 400:
            x = encode(conversation(r, size()), tok)
            if len(x[0]) <= longest: pool.append(x)
        pool.sort(key=lambda x: len(x[0])); groups, cur = [], []
        for x in pool:
            if cur and (len(cur) + 1) * len(x[0]) > tokens: groups.append(cur); cur = []
            cur.append(x)
        groups.append(cur); r.shuffle(groups)
        for g in groups:
            T = max(len(i) for i, _ in g); ids = torch.zeros(len(g), T, dtype=torch.long) + 1; m = torch.zeros(len(g), T, dtype=torch.bool)
            for j, (i, k) in enumerate(g): ids[j, :len(i)] = torch.tensor(i); m[j, :len(k)] = torch.tensor(k)
            yield ids, m

def evaluate(n, tok, size, quantize, seed=99, per_skill=24):
    """Share of conversations whose every target token is the greedy choice, per skill."""
    out = {}
    for f, _ in SKILLS:
        r = random.Random(seed); ok = 0
        for _ in range(per_skill):
            m = f(r, size); m, tools = m if f is tool_use else (m, None)
            ids, k = encode(dict(messages=m, tools=tools, thinking=r.random() < .3), tok); ids = torch.tensor([ids]); k = torch.tensor(k)
            with torch.no_grad(): h, _ = n.forward(ids[:, :-1], quantize=quantize)
            good = (h[0] @ n.P["head.weight"].T).argmax(-1) == ids[0, 1:]
            ok += bool(good[k[1:]].all())
        out[f.__name__] = round(ok / per_skill, 2)
    return out

def main():
    a = argparse.ArgumentParser(); a.add_argument("--out", required=True); a.add_argument("--hours", type=float, default=1.5); a.add_argument("--threads", type=int, default=2); a.add_argument("--tokens", type=int, default=4096); a.add_argument("--lr", type=float, default=0.02)
    a = a.parse_args(); torch.set_num_threads(a.threads); torch.set_flush_denormal(True)
    c = json.load(open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../model/nano/config.json"))); tok = Tokenizer.from_file(f"{a.out}/tokenizer.json"); n = Nano(c)
    ps = n.trainable(); [p.requires_grad_() for p in ps.values()]; opt = Optimizer(ps); step, spent = 0, 0.0
    ck = f"{a.out}/train.pt"
    if os.path.exists(ck):
        d = torch.load(ck)
        for k, v in d["P"].items(): n.P[k].data.copy_(v)
        step, spent = d["step"], d["spent"]
        if d["opt"]: opt.load(d["opt"])
        print("resumed at step", step, "spent", spent, flush=True)
    start = step; r = random.Random(1000 + step); total = a.hours * 3600; phase, feed = None, None; t0 = time.time(); ema = None; log = open(f"{a.out}/log.txt", "a"); base = spent; seen = 0
    def save(): torch.save(dict(P={k: v.detach() for k, v in n.P.items()}, opt=opt.state(), step=step, spent=spent), ck + ".tmp"); os.replace(ck + ".tmp", ck)
    while spent < total:
        x = spent / total; now = 0 if x < .35 else 1 if x < .65 else 2 if x < .9 else 3
        if now != phase:
            phase = now
            longest, size = [(288, lambda: r.randint(2, 9)), (640, lambda: r.choice([4, 8, 12, 16, 24])), (1280, lambda: r.choice([4, 8, 16, 24, 40, 60])), (512, lambda: r.choice([4, 8, 16]))][phase]
            feed = batches(r, tok, size, longest, a.tokens)
        lr = a.lr * min(1, (step - start) / 50) * (1 if x < .5 else max(0.02, (0.9 - x) / 0.4) if x < .9 else 0.3)
        ids, mask = next(feed); k = mask[:, 1:]
        if phase < 3:
            h, _ = n.forward(ids[:, :-1], quantize=phase == 2, train_indexer=phase > 0)
            w = k.float() + 0.02 * (ids[:, 1:] > 1)                              # a little weight on the prompt: it teaches the language
            ce = F.cross_entropy((h @ n.P["head.weight"].T).flatten(0, 1), ids[:, 1:].flatten(), reduction="none").view_as(w)
            loss = (ce * w).sum() / w.sum() + n.index_loss
            tgt = (ce * k).sum().item() / max(1, k.sum().item())
        else:
            h, m = n.forward(ids[:, :-1], quantize=True, mtp=True); k2 = mask[:, 2:].float()
            ce = F.cross_entropy((m @ n.P["head.weight"].detach().T).flatten(0, 1), ids[:, 2:].flatten(), reduction="none").view_as(k2)
            loss = (ce * (k2 + 0.02)).sum() / (k2 + 0.02).sum(); tgt = (ce * k2).sum().item() / max(1, k2.sum().item())
        loss.backward()
        if phase == 3:
            for key, p in ps.items():
                if not key.startswith("mtp."): p.grad = None
        torch.nn.utils.clip_grad_norm_([p for p in ps.values() if p.grad is not None], 1.0)
        opt.step(lr); opt.zero()
        for f, load in n.load.items():                                            # loss-free load balancing
            if phase < 3 or f.startswith("mtp."): n.P[f + "gate.bias"].add_(0.002 * torch.sign(load.mean() - load))
        step += 1; seen += ids.numel(); spent = base + time.time() - t0; ema = tgt if ema is None else .95 * ema + .05 * tgt
        if step % 25 == 0: print(f"step {step} phase {phase} {spent/60:.1f} min loss {ema:.4f} index {n.index_loss.item():.3f} lr {lr:.4f} {seen/(time.time()-t0):.0f} tok/s", file=log, flush=True)
        if step % 200 == 0: save(); print("eval", step, evaluate(n, tok, 6, phase >= 2), file=log, flush=True)
    save(); print("done", step, evaluate(n, tok, 6, True), evaluate(n, tok, 40, True), file=log, flush=True)
if __name__ == "__main__": main()
