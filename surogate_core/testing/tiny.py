"""Tiny things that tests of plugins and of the core train and answer with, and files beside them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path


def write_byte_tokenizer(
    folder: str | Path, special: Sequence[str] = (), *, num_bytes: int = 256, merges: Sequence[tuple[str, str]] = (),
    words: bool = True, **settings: str,
) -> Path:
    """Writes a byte-level BPE tokenizer as a Hugging Face folder has it; returns the folder.

    Ids: the first ``num_bytes`` bytes in the order of their printable characters, what each of ``merges`` makes, the
    ``special`` tokens. ``words``: text is cut into words first; else merges join whatever stands side by side. ``settings``: of
    tokenizer_config.json (eos_token, chat_template, ...).
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[:num_bytes]
    vocab = {text: i for i, text in enumerate([*alphabet, *(a + b for a, b in merges)])}
    tokenizer = Tokenizer(models.BPE(vocab, list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(special))
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **settings}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def write_sentence_modules(folder: str | Path, width: int, pooling: str, *behind: str) -> None:
    """Writes, beside a checkpoint, how sentence-transformers says that its texts become vectors of ``width``. pooling: the mode
    ("mean_tokens", "lasttoken"). behind: kinds of the modules after it ("Dense", "Normalize"), which have their own folders."""
    kinds = [("Transformer", ""), *((kind, f"{i}_{kind}") for i, kind in enumerate(("Pooling", *behind), 1))]
    modules = [{"idx": i, "name": str(i), "path": name, "type": f"sentence_transformers.models.{kind}"}
               for i, (kind, name) in enumerate(kinds)]
    folder = Path(folder)
    (folder / "modules.json").write_text(json.dumps(modules), encoding="utf-8")
    (folder / "1_Pooling").mkdir()
    flags = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")
    config = {"word_embedding_dimension": width, **{f"pooling_mode_{flag}": flag == pooling for flag in flags}}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(config), encoding="utf-8")
