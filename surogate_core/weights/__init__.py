"""Weights and tokenizers: files in, files out, and nothing is ever unpickled.

    store = WeightStore.open("SmolLM2-135M-Instruct.Q4_1.gguf")   # or a Hugging Face folder
    tensor = name_map.load(store, "layers.0.attn.q.weight")       # a view into the mapped file, in the file's format
    write_hf("merged", name_map.export(params), config, tokenizer=tokenizer)

`WeightStore` (store.py) is the face over safetensors_file.py and gguf_file.py; `NameMap` and `Rule` (name_map.py) with
the transforms of transforms.py relate a family's parameters to a file's tensors, both ways. Tokenizers and adapters are
in tokenizer.py and peft_adapter.py, writing of whole models in merge.py and export.py.
"""

from __future__ import annotations

from .formats import FORMATS, Format, byte_count, format_of
from .gguf_file import GGUFFile
from .name_map import NameMap, Rule
from .store import WeightStore
from .tensor import AnyTensor, LazyTensor, StoredTensor, converted, from_f32
from .transforms import AddOne, Chain, Fuse, Identity, PermuteRope, Split, Stack, Transpose

__all__ = [
    "FORMATS", "AddOne", "AnyTensor", "Chain", "Format", "Fuse", "GGUFFile", "Identity", "LazyTensor", "NameMap",
    "PermuteRope", "Rule", "Split", "Stack", "StoredTensor", "Transpose", "WeightStore", "byte_count", "converted",
    "format_of", "from_f32",
]  # fmt: skip
