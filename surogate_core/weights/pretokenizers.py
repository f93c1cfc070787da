"""How byte-level BPE tokenizers cut text into words, by the names that GGUF files give (``tokenizer.ggml.pre``).

Each is a list of patterns applied one after another to the pieces that the one before left. They are written as Hugging
Face's tokenizer.json files write them, so that a tokenizer can be recognised from its patterns when a GGUF is written.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from tokenizers import Regex, normalizers, pre_tokenizers

from ..errors import WeightError

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_HEAD = r"[^\r\n\p{L}\p{N}]?"


def _cased_words(tail: str) -> str:
    return rf"{_HEAD}{_UPPER}*{_LOWER}+{tail}|{_HEAD}{_UPPER}+{_LOWER}*{tail}"


@dataclass(frozen=True)
class PreTokenizer:
    """``patterns`` in order; ``ignore_merges``: a word that is a token as a whole is not merged; ``nfc``: normalised first."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    nfc: bool = False
    add_bos: bool = False  # where the file does not say

    def build(self) -> pre_tokenizers.PreTokenizer:
        """The `tokenizers` object: the cuts, then bytes written as printable characters."""
        own_regex = self.patterns[-1] == _GPT2  # the byte-level step brings this one itself
        cuts = self.patterns[:-1] if own_regex else self.patterns
        steps: list[Any] = [
            pre_tokenizers.Digits(individual_digits=True)
            if pattern == r"\p{N}"
            else pre_tokenizers.Split(Regex(pattern), behavior="isolated")
            for pattern in cuts
        ]
        last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=own_regex)
        return pre_tokenizers.Sequence([*steps, last]) if steps else last

    def normalizer(self) -> normalizers.Normalizer | None:
        return normalizers.NFC() if self.nfc else None


_QWEN2 = "|".join([_CONTRACTIONS, _WORDS, r"\p{N}", _SIGNS, _BLANKS])
_QWEN35 = "|".join(
    [_CONTRACTIONS, r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+", r"\p{N}", r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*", _BLANKS]
)
_LLAMA3 = "|".join([_CONTRACTIONS, _WORDS, r"\p{N}{1,3}", _SIGNS, _BLANKS])
_SLASH_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_TEKKEN = "|".join([_cased_words(""), r"\p{N}", _SLASH_SIGNS, _BLANKS])
_GPT4O = "|".join([_cased_words(_CONTRACTIONS + "?"), r"\p{N}{1,3}", _SLASH_SIGNS, _BLANKS])

_DIGITS_FIRST = PreTokenizer((r"\p{N}", _GPT2))
_PLAIN = PreTokenizer((_GPT2,))
_LLAMA3_PRE = PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True)
_QWEN2_PRE = PreTokenizer((_QWEN2,), nfc=True)

# Of names with the same rule the first is the one that an export writes.
PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "gpt-2": _PLAIN,
    "phi-2": _PLAIN,
    "olmo": _PLAIN,
    "mpt": _PLAIN,
    "smollm": _DIGITS_FIRST,
    "starcoder": _DIGITS_FIRST,
    "refact": _DIGITS_FIRST,
    "codeshell": _DIGITS_FIRST,
    "exaone": _DIGITS_FIRST,
    "llama-bpe": _LLAMA3_PRE,
    "llama3": _LLAMA3_PRE,
    "llama-v3": _LLAMA3_PRE,
    "dbrx": PreTokenizer((_LLAMA3,)),
    "qwen2": _QWEN2_PRE,
    "deepseek-r1-qwen": _QWEN2_PRE,
    "stablelm2": PreTokenizer((_QWEN2,)),
    "qwen35": PreTokenizer((_QWEN35,), nfc=True),
    "tekken": PreTokenizer((_TEKKEN,), ignore_merges=True, add_bos=True),
    "gpt-4o": PreTokenizer((_GPT4O,)),
    "llama4": PreTokenizer((_GPT4O,)),
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
}


def pre_tokenizer(name: str, where: str) -> PreTokenizer:
    """The rule called ``name``; an unknown name is an error, since a guess would cut text differently without a sign."""
    try:
        return PRE_TOKENIZERS[name]
    except KeyError:
        raise WeightError(
            f"{where}: tokenizer.ggml.pre is {name!r}, which is not known; known: {', '.join(PRE_TOKENIZERS)}. "
            "Use the model's Hugging Face folder, whose tokenizer.json says how text is cut"
        ) from None


def _patterns_of(step: dict[str, Any]) -> list[str] | None:
    """The patterns of one step of a tokenizer.json's ``pre_tokenizer``; None when a GGUF has no word for it."""
    kind = step.get("type")
    if kind == "Sequence":
        parts = [_patterns_of(part) for part in step["pretokenizers"]]
        return None if None in parts else [pattern for part in parts for pattern in part or ()]
    if kind == "ByteLevel" and not step.get("add_prefix_space"):
        return [_GPT2] if step.get("use_regex", True) else []
    if kind == "Digits":
        return [r"\p{N}" if step.get("individual_digits") else r"\p{N}+"]
    if kind == "Split":
        pattern = step["pattern"].get("Regex")
        isolated = step["behavior"] == "Isolated" and not step.get("invert")
        kept = step["behavior"] == "Removed" and step.get("invert")
        return [pattern] if pattern and (isolated or kept) else None
    return None


def recognise(spec: dict[str, Any], where: str) -> str:
    """The GGUF name for the ``pre_tokenizer`` and ``normalizer`` of a tokenizer.json; WeightError when there is none."""
    patterns = _patterns_of(spec.get("pre_tokenizer") or {})
    nfc = (spec.get("normalizer") or {}).get("type") == "NFC"
    ignore_merges = bool(spec["model"].get("ignore_merges"))
    for name, known in PRE_TOKENIZERS.items():
        if patterns is not None and known == PreTokenizer(tuple(patterns), ignore_merges, nfc, known.add_bos):
            return name
    raise WeightError(
        f"{where}: GGUF has no name that is known here for how this tokenizer cuts text: "
        f"{json.dumps(spec.get('pre_tokenizer'))[:300]}; export to safetensors instead"
    )
