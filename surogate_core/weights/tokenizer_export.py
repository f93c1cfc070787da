"""A tokenizer as a GGUF's metadata."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import WeightError
from .pretokenizers import recognise
from .tokenizer_build import BYTE, BYTE_TOKENS, CONTROL, NORMAL, PREFIX, UNKNOWN, UNUSED, USER_DEFINED

if TYPE_CHECKING:
    from .tokenizer import Tokenizer, _Facts


def gguf_metadata_of(
    tokenizer: Tokenizer, spec: dict[str, Any], facts: _Facts, vocab_size: int | None
) -> dict[str, Any]:
    """``spec``: the object of the tokenizer's tokenizer.json. See ``Tokenizer.gguf_metadata``."""
    metadata = dict(facts.gguf) if facts.gguf is not None else _from_spec(spec, facts, tokenizer.where)
    if facts.eot is not None:  # a template that was chosen later may have brought it
        metadata[PREFIX + "eot_token_id"] = facts.eot
    for name, template in tokenizer.chat_templates.items():
        metadata["tokenizer.chat_template" + ("" if name == "default" else f".{name}")] = template
    return metadata if vocab_size is None else _padded(metadata, vocab_size, tokenizer.where)


def _padded(metadata: dict[str, Any], vocab_size: int, where: str) -> dict[str, Any]:
    """One token for each row of the embedding: rows beyond the vocabulary get a name of their own."""
    tokens = list(metadata[PREFIX + "tokens"])
    missing = vocab_size - len(tokens)
    if missing < 0:
        raise WeightError(
            f"{where}: {len(tokens)} tokens, but the embedding has {vocab_size} rows; they do not belong together"
        )
    metadata = {**metadata, PREFIX + "tokens": tokens + [f"[PAD{len(tokens) + i}]" for i in range(missing)]}
    for key, dtype, filler in (("token_type", np.int32, UNUSED), ("scores", np.float32, -1e4)):
        if PREFIX + key in metadata:
            values = np.asarray(metadata[PREFIX + key], dtype)
            metadata[PREFIX + key] = np.concatenate([values, np.full(missing, filler, dtype)])
    return metadata


def _from_spec(spec: dict[str, Any], facts: _Facts, where: str) -> dict[str, Any]:
    model = spec["model"]
    if model.get("type") != "BPE":
        raise WeightError(
            f"{where}: a {model.get('type')} tokenizer cannot be written to GGUF, only BPE; export to safetensors"
        )
    vocab: dict[str, int] = dict(model["vocab"])
    added = {token["content"]: token for token in spec["added_tokens"]}
    vocab.update({text: token["id"] for text, token in added.items()})
    texts = {number: text for text, number in vocab.items()}
    tokens = [texts.get(number, f"[PAD{number}]") for number in range(max(texts) + 1)]
    is_sentencepiece = bool(model.get("byte_fallback"))
    types = [_type_of(number, text, texts, added, facts, is_sentencepiece) for number, text in enumerate(tokens)]
    merges = [merge.split(" ", 1) if isinstance(merge, str) else merge for merge in model["merges"]]
    metadata: dict[str, Any] = {
        PREFIX + "model": "llama" if is_sentencepiece else "gpt2",
        PREFIX + "pre": "default" if is_sentencepiece else recognise(spec, where),
        PREFIX + "tokens": tokens,
    }
    if is_sentencepiece:
        metadata[PREFIX + "scores"] = _scores(tokens, merges)
        metadata[PREFIX + "add_space_prefix"] = _has_space_prefix(spec, where)
    metadata[PREFIX + "token_type"] = np.array(types, np.int32)
    if not is_sentencepiece:
        metadata[PREFIX + "merges"] = [" ".join(merge) for merge in merges]
    ends = dict.fromkeys(number for number in (facts.eot, *facts.stop) if number not in (None, facts.eos))
    ids = {"bos": facts.bos, "eos": facts.eos, "unknown": facts.unk, "padding": facts.pad,
           **dict(zip(("eot", "eom"), ends))}  # all that GGUF has for the ends of answers
    metadata.update({f"{PREFIX}{name}_token_id": number for name, number in ids.items() if number is not None})
    metadata[PREFIX + "add_bos_token"] = facts.bos is not None and facts.bos in facts.prefix
    metadata[PREFIX + "add_eos_token"] = facts.eos is not None and facts.eos in facts.suffix
    return metadata


def _type_of(
    number: int, text: str, texts: dict[int, str], added: dict[str, Any], facts: _Facts, is_sentencepiece: bool
) -> int:
    if number not in texts:
        return UNUSED
    if is_sentencepiece and number == facts.unk:
        return UNKNOWN
    if text in added:
        return CONTROL if added[text]["special"] else USER_DEFINED
    return BYTE if is_sentencepiece and text in BYTE_TOKENS else NORMAL


def _scores(tokens: list[str], merges: list[list[str]]) -> np.ndarray:
    """Scores that order the merges as they are: a token is worth minus the rank of the first merge that makes it."""
    rank: dict[str, int] = {}
    for order, (left, right) in enumerate(merges):
        rank.setdefault(left + right, order)
    return np.array([-float(rank.get(token, 0)) for token in tokens], np.float32)


def _has_space_prefix(spec: dict[str, Any], where: str) -> bool:
    """Whether a SentencePiece-like tokenizer puts a space before a text, from its normalizer or pre-tokenizer."""
    normalizer = spec.get("normalizer") or {}
    steps = normalizer.get("normalizers", [normalizer])
    pre = spec.get("pre_tokenizer") or {}
    if pre.get("type") == "Metaspace":
        return pre.get("prepend_scheme", "always") != "never"
    if any(step.get("type") == "Prepend" for step in steps):
        return True
    if any(step.get("type") == "Replace" for step in steps):
        return False
    raise WeightError(f"{where}: cannot tell how this tokenizer writes spaces; export to safetensors instead")
