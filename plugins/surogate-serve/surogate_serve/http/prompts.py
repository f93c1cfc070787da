"""Texts and token ids as completions and embeddings take them: one or several, of either kind."""

from __future__ import annotations

import asyncio
from array import array
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from ..types import Refused
from .limits import APART_BYTES, MAX_ECHO

_WHOLE = TypeAdapter(list[int]).validator


async def read_prompts(
    given: Any, tokenizer: Any, param: str, limit: int, size: int, add_special_tokens: bool = True
) -> list[list[int]]:
    """`prompts_of`, in a thread where it would hold up everyone else's streams. size: bytes of the request."""
    made = given, tokenizer, param, limit, add_special_tokens
    return await asyncio.to_thread(prompts_of, *made) if size >= APART_BYTES else prompts_of(*made)


def prompts_of(given: Any, tokenizer: Any, param: str, limit: int, add_special_tokens: bool = True) -> list[list[int]]:
    """Token ids of every prompt: ``given`` is a text, a list of texts, a list of ids or a list of lists of ids. Raises
    `Refused` that names ``param``."""
    if isinstance(given, str):
        return [_encode(given, tokenizer, param, add_special_tokens)]
    if not isinstance(given, list) or not given:
        raise Refused(f"{param} must be a text, token ids, or a list of either, and not empty", param=param)
    if isinstance(given[0], int):
        return [_ids(given, tokenizer, param)]
    if len(given) > limit:
        raise Refused(f"at most {limit} prompts may be given, not {len(given)}", param=param)
    prompts = []
    for index, each in enumerate(given):
        at = f"{param}[{index}]"
        if isinstance(each, str):
            prompts.append(_encode(each, tokenizer, at, add_special_tokens))
        elif isinstance(each, list):
            prompts.append(_ids(each, tokenizer, at))
        else:
            raise Refused(f"{at} must be a text or a list of token ids", param=at)
    return prompts


def _encode(text: str, tokenizer: Any, param: str, add_special_tokens: bool) -> list[int]:
    tokens = tokenizer.encode(text, add_special_tokens=add_special_tokens)
    if not tokens:
        raise Refused(f"{param} is empty, and this model needs at least one token", param=param)
    return tokens


def _ids(given: list[Any], tokenizer: Any, param: str) -> list[int]:
    if not given:
        raise Refused(f"{param} is empty, and this model needs at least one token", param=param)
    size = tokenizer.vocab_size
    if _all_below(size, given):
        return given
    index, token = next((i, each) for i, each in enumerate(given) if type(each) is not int or not 0 <= each < size)
    raise Refused(
        f"token ids are whole numbers from 0 to {size - 1}, not {repr(token)[:MAX_ECHO]}", param=f"{param}[{index}]"
    )


def _all_below(size: int, given: list[Any]) -> bool:
    """Whether they are whole numbers from 0 to size - 1; a prompt of 512 in 10 microseconds."""
    if not _WHOLE.isinstance_python(given, strict=True):
        return False
    try:
        return int(np.maximum.reduce(np.frombuffer(array("I", given), np.uint32))) < size
    except OverflowError:
        return False
