"""Logits of the embedded model far into its context and beyond it, for test/data/golden/nano-long.json.

    python3 test/reference/nano_long.py PATH/reference.py model/nano > test/data/golden/nano-long.json

PATH/reference.py is the numpy program that the model description was checked with (section 9.4), in f64.
"""
import importlib.util, json, struct, sys
import numpy as np

spec = importlib.util.spec_from_file_location('reference', sys.argv[1])
ref = importlib.util.module_from_spec(spec)
spec.loader.exec_module(ref)

TOKENS, POSITIONS, STRIDE = 5120, [511, 2047, 4095, 4096, 4500, 5119], 5   # every STRIDE-th logit is listed
E4M3 = np.array([(-1.0 if c & 128 else 1.0) * ((c & 7) * 2.0 ** -9 if c & 120 == 0 else (8 + (c & 7)) * 2.0 ** (((c >> 3) & 15) - 10)) for c in range(256)])
E2M1 = np.array([0, .5, 1, 1.5, 2, 3, 4, 6, -0., -.5, -1, -1.5, -2, -3, -4, -6])

def read_weights(directory):
    """Official name -> dequantised values."""
    data = open(directory + '/model.safetensors', 'rb').read()
    size = struct.unpack('<Q', data[:8])[0]; header = json.loads(data[8:8 + size]); header.pop('__metadata__', None)
    raw = lambda n: np.frombuffer(data[8 + size + header[n]['data_offsets'][0]:8 + size + header[n]['data_offsets'][1]], np.uint8)
    W = {}
    for name, info in header.items():
        shape, dtype, b = info['shape'], info['dtype'], raw(name)
        base = name.removesuffix('.weight')
        scale = lambda: np.exp2(raw(base + '.scale').astype(np.float64) - 127).reshape(header[base + '.scale']['shape'])
        if dtype == 'F8_E8M0': continue
        if dtype == 'I64': W[name] = b.view('<i8').reshape(shape)
        elif dtype == 'F32': W[name] = b.view('<f4').astype(np.float64).reshape(shape)
        elif dtype == 'BF16': W[name] = (b.view('<u2').astype(np.uint32) << np.uint32(16)).astype(np.uint32).view(np.float32).astype(np.float64).reshape(shape)
        elif dtype == 'F8_E4M3':
            s = np.repeat(np.repeat(scale(), 128, 0), 128, 1)[:shape[0], :shape[1]]; W[name] = E4M3[b].reshape(shape) * s
        else:
            v = np.stack([E2M1[b & 15], E2M1[b >> 4]], -1).reshape(shape[0], -1); W[name] = v * np.repeat(scale(), 32, 1)
    return W

def main():
    c = json.load(open(sys.argv[2] + '/config.json'))
    ids, x = [], 1
    for _ in range(TOKENS):
        x = (x * 1103515245 + 12345) % 2 ** 31; ids.append((x >> 16) % c['vocab_size'])
    W = {k: v for k, v in read_weights(sys.argv[2]).items() if not k.startswith('mtp.')}
    m = ref.Model(c, W); rows = []
    for first in range(0, TOKENS, 512):
        full = m.forward(ids[first:first + 512]); rows += [full[t - first] for t in POSITIONS if first <= t < first + 512]
        print(first, m.gap, file=sys.stderr, flush=True)
    rows = np.stack(rows); top = np.sort(rows, 1)
    print(json.dumps(dict(tokens=TOKENS, positions=POSITIONS, stride=STRIDE, argmax=[int(v) for v in rows.argmax(1)],
                          margin=[round(float(v), 6) for v in top[:, -1] - top[:, -2]],
                          logits=[[round(float(v), 7) for v in row[::STRIDE]] for row in rows]), separators=(',', ':')))

main()
