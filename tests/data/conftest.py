"""A tiny byte-level tokenizer, trained in the test run, with the interface of the product's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers

from surogate_core.data import DatasetSpec

CORPUS = ["the quick brown fox jumps over the lazy dog", "assistant user system tool think answer question hello world",
          "what is the weather in Paris today", "Response: Instruction: one two three four five\n\n"] * 8
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>", "</s>", "<|begin_of_text|>", "<|eot_id|>",
           "<|start_header_id|>", "<|end_header_id|>", "[INST]", "[/INST]"]


class TinyTokenizer:
    """Ids by a small byte-level BPE. bos, eos: special tokens by name; adds_bos: whether plain text gets a BOS."""

    def __init__(self, bos="<|im_start|>", eos="<|im_end|>", adds_bos=False, chat_template=None):
        self._inner = tokenizers.Tokenizer(tokenizers.models.BPE())
        self._inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        self._inner.decoder = tokenizers.decoders.ByteLevel()
        trainer = tokenizers.trainers.BpeTrainer(vocab_size=420, special_tokens=SPECIAL, show_progress=False,
                                                 initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet())
        self._inner.train_from_iterator(CORPUS, trainer)
        self.bos_token, self.eos_token, self.chat_template = bos, eos, chat_template
        self.bos_token_id = self._inner.token_to_id(bos) if bos else None
        self.eos_token_id = self._inner.token_to_id(eos) if eos else None
        self.pad_token_id = self.eos_token_id
        self._adds_bos = adds_bos

    def encode(self, text, add_special_tokens=False):
        ids = self._inner.encode(text, add_special_tokens=False).ids
        return [self.bos_token_id, *ids] if add_special_tokens and self._adds_bos else ids

    def encode_with_offsets(self, text):
        encoded = self._inner.encode(text, add_special_tokens=False)
        return encoded.ids, encoded.offsets

    def decode(self, ids):
        return self._inner.decode(ids, skip_special_tokens=False)

    def id(self, token):
        return self._inner.token_to_id(token)


@pytest.fixture(scope="session")
def tokenizer():
    return TinyTokenizer()


@pytest.fixture(scope="session")
def make_tokenizer():
    return TinyTokenizer


@pytest.fixture
def jsonl(tmp_path):
    """Writes rows (objects, or lines as they are) to a file and returns its DatasetSpec."""

    def write(rows, name="rows.jsonl", **spec):
        path = Path(tmp_path) / name
        lines = [row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return DatasetSpec(str(path), **spec)

    return write
