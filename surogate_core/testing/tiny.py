"""Tiny things that tests of plugins and of the core train and answer with."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path


def write_byte_tokenizer(
    folder: str | Path, special: Sequence[str] = (), *, num_bytes: int = 256, merges: Sequence[tuple[str, str]] = (),
    **settings: str,
) -> Path:
    """Writes a byte-level BPE tokenizer as a Hugging Face folder has it; returns the folder.

    Ids: the first ``num_bytes`` bytes in the order of their printable characters, what each of ``merges`` makes, the
    ``special`` tokens. ``settings``: of tokenizer_config.json (eos_token, chat_template, ...).
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[:num_bytes]
    vocab = {text: i for i, text in enumerate([*alphabet, *(a + b for a, b in merges)])}
    tokenizer = Tokenizer(models.BPE(vocab, list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(special))
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **settings}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder
