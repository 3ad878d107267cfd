#!/usr/bin/env python3
"""Copies reference outputs of transformers 5.24 into this folder, smaller.

Usage: trim.py GOLDENS_DIR. Keeps every tensor; pixel_values become u8, round((x*0.5+0.5)*255), which the processor made
them from; hidden_* of long prompts and vis_embed/vis_layer0 of sliced pictures (more than 256 patches) are dropped, since
the tensors after them depend on them.
"""
import json, pathlib, shutil, sys
import numpy as np
from safetensors.numpy import load_file, save_file

src, here = pathlib.Path(sys.argv[1]), pathlib.Path(__file__).parent
for model in ("tiny-moe", "tiny-dense"):
    out = here / model
    out.mkdir(exist_ok=True)
    for f in sorted((src / model).glob("*.json")):
        data = json.loads(f.read_text())
        (out / f.name).write_text(json.dumps(data, ensure_ascii=False, separators=(",", ":")) + "\n")
    for f in sorted((src / model).glob("*.safetensors")):
        t = load_file(f)
        small = {}
        for name, a in t.items():
            if name.startswith("pixel_values"):
                a = np.rint((a * 0.5 + 0.5) * 255).astype(np.uint8)
            if name in ("vis_embed", "vis_layer0") and a.shape[0] > 256:
                continue
            small[name] = np.ascontiguousarray(a)
        save_file(small, out / f.name)
for name in ("pictures", "photos", "preprocess", "eval", "text"):
    shutil.copytree(src / name, here / name, dirs_exist_ok=True)
for name in ("chat_template.json", "tokenizer.json"):
    shutil.copy(src / name, here / name)
