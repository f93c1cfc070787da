"""Finds the spellings of many tokens in a text, and makes sure that a text spells none."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any


class Spellings:
    """Some tokens' spellings, as one pattern that finds the longest at each place."""

    def __init__(self, spellings: Iterable[str], cut_out: bool = False) -> None:
        """cut_out: parts of a text may be cut out after it was broken, so that a spelling may come of any beginning."""
        words = {each for each in spellings if len(each) > 1}
        self.pattern = re.compile(_pattern_of(words)) if words else None
        self._beginnings = {word[:size] for word in words for size in range(1, len(word))}
        self._longest = max(map(len, self._beginnings), default=0)
        # A place where one begins, even inside another.
        begin = (
            "[" + "".join(map(re.escape, sorted({word[0] for word in words}))) + "]" if cut_out else _pattern_of(words)
        )
        self._begins = re.compile(f"(?={begin})") if words else None

    def broken(self, text: str, breaker: str) -> str:
        """The text with ``breaker`` behind the first character of every spelling, and of what the text's end may be the
        beginning of: whatever is done to the text, and put behind it, no spelling comes of it."""
        if self._begins is None:
            return text
        places = {match.start() for match in self._begins.finditer(text)}
        end = text.rstrip()
        sizes = range(1, min(self._longest, len(end)) + 1)
        places.update(len(end) - size for size in sizes if end[-size:] in self._beginnings)
        cuts = [0, *(place + 1 for place in sorted(places)), len(text)]
        return breaker.join(text[start:stop] for start, stop in pairwise(cuts))

    def broken_in(self, value: Any, breaker: str) -> Any:
        """The same for every text in lists and mappings, keys too. Other values are as they are, and so are keys and
        values of "role" and "type" that are plain words: templates compare them."""
        if isinstance(value, str):
            return self.broken(value, breaker)
        if isinstance(value, Mapping):
            return {
                key if _is_word(key) else self.broken_in(key, breaker): item
                if key in ("role", "type") and _is_word(item)
                else self.broken_in(item, breaker)
                for key, item in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.broken_in(item, breaker) for item in value]
        return value


def _is_word(value: Any) -> bool:
    return isinstance(value, str) and value.isidentifier()


def new_breaker() -> str:
    """Digits that nobody can guess: filters that templates use on texts leave digits alone."""
    return str(secrets.randbelow(9 * 10**23) + 10**23)


def _pattern_of(words: set[str]) -> str:
    """A tree of the words' characters, so that the time at a place does not grow with the number of words."""
    tree: dict[str, Any] = {}
    for word in words:
        node = tree
        for char in word:
            node = node.setdefault(char, {})
        node[""] = {}
    return _branches(tree)


def _branches(node: dict[str, Any]) -> str:
    text = ""
    while len(node) == 1:  # a stretch without branches, so that the nesting stays shallow
        ((char, node),) = node.items()
        text += re.escape(char)
        if not node:
            return text
    options = [re.escape(char) + _branches(child) for char, child in sorted(node.items()) if char]
    return f"{text}(?:{'|'.join(options)}){'?' if '' in node else ''}"
