#!/usr/bin/env bash
# Fills tests/fuzz/corpus/TARGET from the files that come with the repository. Safe to run again.
set -euo pipefail
cd "$(dirname "$0")"
mkdir -p corpus/{gguf,model,safetensors,picture,template,tokenizer,schema}
cp ../pictures/*.png ../pictures/*.jpg ../pictures/*.webp ../demo/*.png corpus/picture/
python3 - <<'PY'
import json, struct

def string(s):
    return struct.pack("<Q", len(s)) + s

def gguf(keys, tensors, align=32):
    out = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(keys))
    out += b"".join(string(k) + struct.pack("<I", kind) + v for k, kind, v in keys)
    for name, ne, kind, offset in tensors:
        out += string(name) + struct.pack("<I", len(ne)) + struct.pack(f"<{len(ne)}Q", *ne)
        out += struct.pack("<IQ", kind, offset)
    return out + bytes(-len(out) % align)

def u32s(*v):
    return struct.pack("<IQ", 4, len(v)) + struct.pack(f"<{len(v)}I", *v)

# One key of every type, and two tensors inside the file.
keys = [(b"a", 0, b"\7"), (b"b", 1, b"\xf9"), (b"c", 2, b"\1\0"), (b"d", 3, b"\xff\xff"), (b"e", 4, b"\1\0\0\0"),
        (b"f", 5, b"\xff" * 4), (b"g", 6, struct.pack("<f", 1.5)), (b"h", 7, b"\1"), (b"i", 8, string("é".encode())),
        (b"j", 9, u32s(1, 2)), (b"k", 9, struct.pack("<IQ", 8, 2) + string(b"x") + string(b"")),
        (b"l", 10, bytes(8)), (b"m", 11, b"\xff" * 8), (b"n", 12, struct.pack("<d", 0.5))]
small = gguf(keys, [(b"t", [4, 2], 0, 0), (b"u", [32], 8, 32)]) + bytes(96)
open("corpus/gguf/small", "wb").write(small)

# The bundled models' headers, each up to its data.
for name in ["tiny-moe", "tiny-dense"]:
    data = open(f"../models/{name}.gguf", "rb").read()
    at = 0
    def take(f):
        global at
        at += struct.calcsize("<" + f)
        return struct.unpack_from("<" + f, data, at - struct.calcsize("<" + f))[0]
    def skip(kind):
        global at
        if kind == 8:
            n = take("Q"); at += n
        elif kind == 9:
            of, n = take("I"), take("Q")
            for _ in range(n):
                skip(of)
        else:
            at += [1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8][kind]
    at, template = 8, None
    tensors, count = take("Q"), take("Q")
    for _ in range(count):
        n = take("Q"); key = data[at:at + n]; at += n
        kind = take("I")
        if key == b"tokenizer.chat_template":
            n = struct.unpack_from("<Q", data, at)[0]
            open(f"corpus/template/{name}", "wb").write(data[at + 8:at + 8 + n])
        skip(kind)
    for _ in range(tensors):
        n = take("Q"); at += n
        dims = take("I"); at += 8 * dims + 12
    open(f"corpus/gguf/{name}", "wb").write(data[:at + -at % 4096])

for name, source in {
    "loop": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m['content'] | tojson(indent=2) }}<|im_end|>{% endfor %}",
    "space": "{% set ns = namespace(n=0) %}{%- for i in range(9) if i % 2 -%}{% set ns.n = ns.n + i %}{% endfor %}{{ ns.n }}",
    "macro": "{% macro f(x, y=[]) %}{{ x.split('\\n')[-1].strip() ~ y|join(', ') }}{% endmacro %}{{ f('a\\nb', ['c']) }}",
    "error": "{% if tools is defined and messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}",
    "methods": "{{ 'abc'.replace('b', 'x').upper()[::-1] }}{{ {'a': 1}.items()|list }}{{ messages|selectattr('role', 'equalto', 'user')|map(attribute='content')|list|length }}",
}.items():
    open(f"corpus/template/{name}", "w").write(source)

def tensor(dtype, shape, begin, end):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
for name, size, header in [
    ("two", 32, {"__metadata__": {"format": "pt"}, "a": tensor("F32", [2, 2], 0, 16), "b": tensor("BF16", [8], 16, 32)}),
    ("scalar", 2, {"s": tensor("F16", [], 0, 2)}), ("other", 8, {"x": tensor("I64", [1], 0, 8)}),
    ("empty", 0, {"e": tensor("F32", [0, 7], 0, 0), "f": tensor("F16", [3, 0], 0, 0)}), ("none", 0, {}),
]:
    open(f"corpus/safetensors/{name}", "wb").write(struct.pack("<H", size) + json.dumps(header).encode())

text = {"type": "string"}
for name, schema in {
    "review": {"type": "object", "properties": {"observations": {"type": "array", "items": text, "minItems": 3, "maxItems": 8},
               "confidence": {"type": "number", "minimum": 0, "maximum": 1}, "level": {"type": "integer", "minimum": 0, "maximum": 2},
               "note": {"type": ["string", "null"], "maxLength": 9}}, "required": ["observations", "confidence"]},
    "any": {}, "object": {"type": "object", "additionalProperties": text, "properties": {"a": text, "ab": {"enum": [1, 10, "x", None]}}},
    "tree": {"$ref": "#/$defs/t", "$defs": {"t": {"type": "object", "properties": {"t": {"type": "array", "items": {"$ref": "#/$defs/t"}}},
             "required": ["t"]}}},
    "or": {"anyOf": [{"const": "a"}, {"oneOf": [{"type": "integer"}, {"type": "array", "prefixItems": [text], "items": False}]}]},
    "bounds": {"type": "array", "items": {"type": "number", "exclusiveMinimum": -1.5, "exclusiveMaximum": 1e-3}, "minItems": 2},
}.items():
    for seed in range(3):
        choices = bytes((i * 37 + seed * 91) * (i + seed) % 256 for i in range(30))
        open(f"corpus/schema/{name}{seed}", "wb").write(json.dumps(schema).encode() + b"\0" + choices)
PY
