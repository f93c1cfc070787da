"""API keys: several, as a bearer token or in `x-api-key`, compared in constant time."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Sequence

from ..types import Refused

Headers = Iterable[tuple[bytes, bytes]]


class Keys:
    """A set of keys. Only digests are kept, so that a comparison's time tells neither a key nor its length."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def holder(self, headers: Headers) -> str | None:
        """A short name of the key that the headers carry, for logs and for what belongs to one key; None where they
        carry none of ours. Every key is compared, whether one was found or not."""
        found: bytes | None = None
        for given in given_keys(headers):
            digest = hashlib.sha256(given).digest()
            for ours in self._digests:
                if hmac.compare_digest(ours, digest):
                    found = ours
        return None if found is None else found.hex()[:12]


def given_keys(headers: Headers) -> list[bytes]:
    """What a request's headers (names in lower case) offer as keys."""
    keys = []
    for name, value in headers:
        if name == b"x-api-key":
            keys.append(value.strip())
        elif name == b"authorization":
            scheme, _, token = value.strip().partition(b" ")
            if scheme.lower() == b"bearer":
                keys.append(token.strip())
    return keys


def refusal(headers: Headers) -> Refused:
    """The answer to a request without a key of ours."""
    if not given_keys(headers):
        return Refused(
            "no API key was given: send it as `Authorization: Bearer KEY` or as `x-api-key: KEY`",
            401,
            "invalid_api_key",
        )
    return Refused("the API key is not one of this server's", 401, "invalid_api_key")
