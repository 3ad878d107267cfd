"""Lists keys and tensors of a model file with PyPI's `gguf` (pip install gguf): python3 list_with_gguf.py FILE"""

import sys
from gguf import GGUFReader

reader = GGUFReader(sys.argv[1])
for name, field in reader.fields.items():
    print(name, [t.name for t in field.types], str(field.contents())[:70].replace("\n", "\\n"))
for t in reader.tensors:
    print(t.name, t.tensor_type.name, t.shape.tolist(), t.data_offset, t.n_bytes)
