"""Builds a `tokenizers` tokenizer from a GGUF's metadata, exactly: same cuts, same merges, same special tokens."""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

from ..errors import WeightError
from .pretokenizers import pre_tokenizer

PREFIX = "tokenizer.ggml."
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
SPACE = "▁"  # how SentencePiece writes a space inside a token
BYTE_TOKENS = [f"<0x{value:02X}>" for value in range(256)]


def build_from_gguf(metadata: dict[str, Any], where: str) -> Tokenizer:
    """``metadata``: a GGUF's; ``where``: its path, for errors. Raises WeightError for kinds that are not supported."""
    kind = metadata.get(PREFIX + "model")
    build = {"gpt2": _byte_level, "llama": _sentencepiece, "gemma4": _sentencepiece_of_merges}.get(kind)
    if build is None:
        raise WeightError(
            f"{where}: tokenizer.ggml.model is {kind!r}; tokenizers of the kinds 'gpt2' (byte-level BPE), 'llama' and 'gemma4' "
            "(SentencePiece BPE, by scores and by merges) can be built from a GGUF. Use the model's Hugging Face folder instead"
        )
    tokens = _list(metadata, "tokens", where)
    vocab = {token: number for number, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        twice = next(token for number, token in enumerate(tokens) if vocab[token] != number)
        raise WeightError(f"{where}: tokenizer.ggml.tokens holds {twice!r} twice; convert the model again")
    types = _list(metadata, "token_type", where, len(tokens)) if PREFIX + "token_type" in metadata else []
    types = types or [NORMAL] * len(tokens)
    tokenizer = build(metadata, vocab, tokens, types, where)
    ends = [token_id(metadata, name, where) for name in ("bos", "eos", "eot", "eom")]
    _add_tokens(tokenizer, [number for number in ends if number is not None], tokens, types)
    return tokenizer


def token_id(metadata: dict[str, Any], name: str, where: str) -> int | None:
    """``tokenizer.ggml.<name>_token_id``, checked against the vocabulary; None when it is not set."""
    value = metadata.get(f"{PREFIX}{name}_token_id")
    if value is not None and not (type(value) is int and 0 <= value < len(metadata[PREFIX + "tokens"])):
        raise WeightError(
            f"{where}: tokenizer.ggml.{name}_token_id is {value!r}, outside the vocabulary; convert it again"
        )
    return value


def _list(metadata: dict[str, Any], name: str, where: str, length: int | None = None) -> list[Any]:
    values = metadata.get(PREFIX + name)
    if not isinstance(values, list) or not values or (length is not None and len(values) != length):
        wanted = "a list" if length is None else f"a list of {length}, one for each token"
        raise WeightError(f"{where}: tokenizer.ggml.{name} must be {wanted}; the file has no usable tokenizer")
    return values


def _byte_level(
    metadata: dict[str, Any], vocab: dict[str, int], tokens: list[str], types: list[int], where: str
) -> Tokenizer:
    pre = pre_tokenizer(metadata.get(PREFIX + "pre", "default"), where)
    tokenizer = Tokenizer(models.BPE(vocab, _merges(metadata, vocab, where), ignore_merges=pre.ignore_merges))
    normalizer = pre.normalizer()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre.build()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _merges(metadata: dict[str, Any], vocab: dict[str, int], where: str) -> list[tuple[str, str]]:
    merges = []
    for line in _list(metadata, "merges", where):
        left, gap, right = line.partition(" ")
        if not gap or not {left, right, left + right} <= vocab.keys():
            raise WeightError(f"{where}: merge {line!r} does not join two tokens into a third; convert the model again")
        merges.append((left, right))
    return merges


def _sentencepiece(
    metadata: dict[str, Any], vocab: dict[str, int], tokens: list[str], types: list[int], where: str
) -> Tokenizer:
    scores = _list(metadata, "scores", where, len(tokens))
    merges = merges_by_score(vocab, scores, types)
    return _of_characters(metadata, vocab, tokens, merges, metadata.get(PREFIX + "add_space_prefix", True), where)


def _sentencepiece_of_merges(
    metadata: dict[str, Any], vocab: dict[str, int], tokens: list[str], types: list[int], where: str
) -> Tokenizer:
    """The same alphabet, with an order of merges that is written down, and never a space before a text."""
    return _of_characters(metadata, vocab, tokens, _merges(metadata, vocab, where), False, where)


def _of_characters(
    metadata: dict[str, Any], vocab: dict[str, int], tokens: list[str], merges: list[tuple[str, str]], prefixed: bool,
    where: str,
) -> Tokenizer:
    """BPE over the characters of a text whose spaces are `SPACE`; others than those of tokens become their bytes.
    ``prefixed``: a space is put before the text."""
    unknown = token_id(metadata, "unknown", where)
    model = models.BPE(
        vocab,
        merges,
        unk_token=tokens[unknown] if unknown is not None else None,
        fuse_unk=True,
        byte_fallback=all(token in vocab for token in BYTE_TOKENS),
    )
    tokenizer = Tokenizer(model)
    spaces = normalizers.Replace(" ", SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces]) if prefixed else spaces
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefixed else steps)
    return tokenizer


def merges_by_score(vocab: dict[str, int], scores: list[float], types: list[int]) -> list[tuple[str, str]]:
    """The merges of a SentencePiece BPE: any two tokens that make a third, the best-scored result first.

    SentencePiece merges whichever neighbours make the token of the highest score; ranking pairs by their result's score
    makes an ordinary BPE do the same.
    """
    ranked = []
    for token, number in vocab.items():
        if types[number] in (CONTROL, UNKNOWN, BYTE) or len(token) < 2:
            continue
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocab and right in vocab:
                ranked.append((-scores[number], number, vocab[left], vocab[right], left, right))
    ranked.sort()
    return [(left, right) for *_, left, right in ranked]


def _add_tokens(tokenizer: Tokenizer, ends: list[int], tokens: list[str], types: list[int]) -> None:
    """Control tokens are special; user-defined ones are matched in any text, before merging, and are printed."""
    special = {*ends, *(number for number, kind in enumerate(types) if kind in (CONTROL, UNKNOWN))}
    tokenizer.add_special_tokens([AddedToken(tokens[i], special=True, normalized=False) for i in sorted(special)])
    plain = [i for i, kind in enumerate(types) if kind == USER_DEFINED and i not in special]
    tokenizer.add_tokens([AddedToken(tokens[i], special=False, normalized=False) for i in plain])
