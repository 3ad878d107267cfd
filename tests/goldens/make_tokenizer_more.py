#!/usr/bin/env python3
"""Writes tokenizer_more.json: text that is hard to split, tokenized by Hugging Face's tokenizers (0.23, Python).

Usage: make_tokenizer_more.py TOKENIZER_JSON. Same form as tokenizer.json: {text, ids, decoded}; seeded.
"""
import json, pathlib, random, sys
from tokenizers import Tokenizer

tok = Tokenizer.from_file(sys.argv[1])
rnd = random.Random(47)
pieces = [" ", "  ", "\t", "\n", "\r\n", "\n\n", "\u00a0", "\u3000", "\u2028", "a", "word", " word", "I'm", "'LL", "it's", "DON'T",
          "7", "42", "٣", "½", "é", "e\u0301", "\u0301", "क्षि", "ไทย", "日本語", "한국어", "\u1112\u1161\u11ab", "Å", "ﬁ", "Ⅻ", "😀", "👨‍👩‍👧", ".", "...", "!?",
          "(", ")", "—", "_", "$", "\u200b", "\u0000", "\x7f", "\x85", "<think>", "</think>", "<|im_start|>", "<|im", "|>", "<image>", "<box>", "\\n", "ſ", "K"]
texts = ["", " ", "\n", "   \n  x", "a  b", "a   \n", "x\u00a0\u00a0y", "\t\tfn main() {\n\t}\n", "𝔘𝔫𝔦", "\ufffd", "cafe\u0301", "1234567890"]
texts += ["".join(rnd.choice(pieces) for _ in range(rnd.randint(2, 14))) for _ in range(200)]
out = []
for text in texts:
    ids = tok.encode(text, add_special_tokens=False).ids
    out.append({"text": text, "ids": ids, "decoded": tok.decode(ids, skip_special_tokens=False)})
path = pathlib.Path(__file__).parent / "tokenizer_more.json"
path.write_text(json.dumps(out, ensure_ascii=True, separators=(",", ":")) + "\n")
