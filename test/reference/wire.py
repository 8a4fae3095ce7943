"""One message of each type as bytes on the wire, written from docs/protocol.md alone: its own msgpack, its own CRC.

    python3 test/reference/wire.py > test/data/golden/wire.json

test/unit/transfer/wire.test.ts compares the encoder and decoder of transfer/messages.ts with the result.
"""

import json
import struct


def msgpack(value):
    """The shortest form of each value; floating point is always 64 bits."""
    if value is None:
        return b"\xc0"
    if value is True:
        return b"\xc3"
    if value is False:
        return b"\xc2"
    if isinstance(value, int):
        for limit, form in ((0x80, None), (0x100, (0xCC, ">B")), (0x10000, (0xCD, ">H")), (2**32, (0xCE, ">I"))):
            if 0 <= value < limit:
                return bytes([value]) if form is None else bytes([form[0]]) + struct.pack(form[1], value)
        return b"\xcf" + struct.pack(">Q", value)
    if isinstance(value, float):
        return b"\xcb" + struct.pack(">d", value)
    if isinstance(value, str):
        text = value.encode()
        head = bytes([0xA0 | len(text)]) if len(text) < 32 else b"\xd9" + bytes([len(text)])
        return head + text
    if isinstance(value, bytes):
        return b"\xc4" + bytes([len(value)]) + value
    if isinstance(value, list):
        return bytes([0x90 | len(value)]) + b"".join(msgpack(each) for each in value)
    if isinstance(value, dict):
        return bytes([0x80 | len(value)]) + b"".join(msgpack(k) + msgpack(v) for k, v in value.items())
    raise TypeError(value)


def crc32c(data):
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def pack_choices(choices):
    """Of two likeliest each."""
    parts = []
    for choice in choices:
        ids = choice["topIds"] + [2**32 - 1] * (2 - len(choice["topIds"]))
        values = choice["topLogprobs"] + [0] * (2 - len(choice["topLogprobs"]))
        parts.append(struct.pack("<fIfIf", choice["logprob"], ids[0], values[0], ids[1], values[1]))
    return b"".join(parts)


def frame(message):
    """Frame 0: the values of the fields in the order of the table, which is the order they are written in below."""
    packed = {"promptTokens": lambda ids: struct.pack(f"<{len(ids)}I", *ids), "promptChoices": pack_choices}
    fields = [packed[k](v) if k in packed else v for k, v in message.items()]
    body = msgpack(fields)
    return b"HO\x01\x00" + struct.pack("<I", crc32c(body)) + body


def mul(a, b):
    return a * b & 0xFFFFFFFF


def rotate(word, bits):
    return (word << bits | word >> (32 - bits)) & 0xFFFFFFFF


def finish(word):
    word = mul(word ^ word >> 16, 0x85EBCA6B)
    word = mul(word ^ word >> 13, 0xC2B2AE35)
    return word ^ word >> 16


def prompt_digest(tokens, model):
    a, b = 0x9E3779B9 ^ len(tokens), 0x85EBCA6B
    for word in [ord(letter) for letter in model] + tokens:
        a = rotate(mul(a ^ word, 0xCC9E2D51), 15)
        b = rotate((mul(b ^ word, 0x1B873593) + 0x27D4EB2F) & 0xFFFFFFFF, 13)
    return f"{finish(a ^ mul(b, 3)):08x}{finish((b + a) & 0xFFFFFFFF):08x}"


P = "018bcfe56800deadbeef"
D = "018bcfe5680100000001"
KEY = "00000000000500000006-12.3"
PEER = {"from": P, "to": D, "key": KEY}
TO_P = {"from": D, "to": P, "key": KEY}
REF_P = {"name": "prefill@a:8100", "epoch": P, "address": "tcp://10.0.0.1:9001"}
REF_D = {"name": "decode@b:8200", "epoch": D, "address": ""}
PAYLOAD = bytes(range(20))
CHOICE = {"logprob": -0.5, "topIds": [9, 70000], "topLogprobs": [-0.5, -1.25]}
RULES = {"presencePenalty": -0.5, "frequencyPenalty": 2, "repetitionPenalty": 1.25, "biasIds": [7, 300],
         "biases": [100, -99.5], "minTokens": 3}

MESSAGES = [
    {"type": "HELLO", "version": 4, "role": "decode", "name": "d0", "epoch": D, "link": 1, "fields": {"model": "x"}},
    {"type": "WELCOME", "version": 4, "role": "prefill", "name": "p0", "epoch": P, "link": 1,
     "dataAddress": "tcp://*:9002", "fields": {"model": "x", "layout": "{}"}},
    {"type": "REFUSE", "epoch": P, "link": 2, "field": "model", "ours": "x", "theirs": "y"},
    {"type": "PING", "from": P, "to": "", "link": 300, "answer": True},
    {"type": "OPEN", **TO_P, "digest": "0123456789abcdef", "tokenCount": 300},
    {"type": "QUEUED", **PEER, "state": "computing"},
    {"type": "RESERVED", **TO_P,
     "manifest": {"tokenCount": 300, "validInLastPage": 44, "pageCount": 3, "pageBytes": 49664, "slotBytes": 70000,
                  "generations": [1, 2, 4294967295, 4]},
     "credit": 2**40},
    {"type": "CHUNK", **PEER, "sequence": 7, "firstUnit": 1, "generations": [2, 4294967295],
     "checksums": [crc32c(PAYLOAD[:10]), crc32c(PAYLOAD[10:])], "payloadBytes": 20},
    {"type": "CREDIT", **TO_P, "bytes": 65536},
    {"type": "END", **PEER, "unitCount": 4, "tokenCount": 300, "digest": "0123456789abcdef", "firstToken": 9,
     "firstChoice": CHOICE, "promptChoices": [CHOICE, {"logprob": -3.5, "topIds": [], "topLogprobs": []}],
     "checksum": 3735928559},
    {"type": "DONE", **TO_P},
    {"type": "DONE_ACK", **PEER},
    {"type": "ABORT", **PEER, "reason": "deadline"},
    {"type": "ABORT_ACK", **PEER},
    {"type": "submit", "key": KEY, "prefill": REF_P, "decode": REF_D, "digest": "0123456789abcdef",
     "promptTokens": [0, 70000, 4294967295], "maxTokens": 10, "stopTokens": [1],
     "sampling": {"temperature": 0.5, "topK": 0, "topP": 1, "minP": 0, "seed": 42, "rules": RULES, "logprobs": 2,
                  "promptLogprobs": True},
     "salt": "0123456789abcdef" * 4, "budgetMs": 1234.5},
    {"type": "cancel", "key": KEY, "reason": "client_lost"},
    {"type": "peer_failed", "key": KEY},
    {"type": "end_ack", "key": KEY},
    {"type": "mark", "smallestSequence": 9},
    {"type": "drain"},
    {"type": "accepted", "key": KEY, "epoch": P},
    {"type": "tokens", "epoch": D, "rows": [{"key": KEY, "position": 2, "tokens": [5, 1023], "choices": [CHOICE, CHOICE]}]},
    {"type": "end", "key": KEY, "epoch": D, "outcome": {"ok": False, "reason": "gone"}, "tokenCount": 1},
    {"type": "load", "epoch": D, "rooms": 1, "roomLimit": 128, "running": 3, "queuedTokens": 40000, "pagesFree": 5,
     "pagesTotal": 600, "draining": False},
    {"type": "cached", "key": KEY, "epoch": P, "tokenCount": 1920},
]

DIGESTS = [([], ""), ([0], "m"), ([1, 2, 3], "model"), ([4294967295, 0], "model")]

print(json.dumps({
    "messages": [
        {"message": each, "frames": [frame(each).hex(), *([PAYLOAD.hex()] if each["type"] == "CHUNK" else [])]}
        for each in MESSAGES
    ],
    "digests": [{"tokens": t, "model": m, "digest": prompt_digest(t, m)} for t, m in DIGESTS],
    "combined": [{"checksums": c, "checksum": crc32c(struct.pack(f"<{len(c)}I", *c))}
                 for c in ([], [0], [1, 2], [3735928559, 5, 4294967295])],
}, indent=1))
