"""How large everything is: sequences, cache, context, and the buckets that programs are planned for."""

from __future__ import annotations

from dataclasses import dataclass

from surogate_core import engine
from surogate_core.errors import ConfigError
from surogate_core.passes.paged_kv import BLOCK_SIZE

from .options import EngineOptions

PLACES = {"cpu": 16, "cuda": 128}
TOKEN_BUDGET = {"cpu": 512, "cuda": 8192}
SMALLEST_CHUNK = {"cpu": 32, "cuda": 64}
FEW_ROWS = 8
"""Rows of the buckets that take a prompt by itself; a whole batch's logits would cost more than the prompt does."""
SHORT_TURNS = (8, 16, 32)
"""Tokens of buckets of one row on the CPU: what a prompt takes by itself whose beginning is in the cache."""
DECODES_BETWEEN = (3, 5, 6, 7, 10, 12)
"""Tokens of steps that only decode, beside the powers of two."""
SMALL_CHUNK = 512
"""Up to so many tokens there is a bucket of few rows."""

HOST_SHARE, HOST_CAP = 0.25, 1 << 30
"""Of the memory that is available, what a cache in host memory may take, and at most."""
DEVICE_SHARE = 0.92
"""Of what weights and programs leave of a device."""
DECODED_SHARE = 0.5
"""Of what a device has free, what decoded copies of quantised weights may take."""
DEVICE_RESERVE = 1 << 30
"""Bytes left to a device's libraries and to recorded graphs."""


@dataclass(frozen=True)
class Bucket:
    """A program's tokens and rows. decode: one token of each sequence."""

    tokens: int
    rows: int
    decode: bool


def places(options: EngineOptions) -> int:
    return options.max_sequences or PLACES.get(options.backend, PLACES["cuda"])


def context(options: EngineOptions, most: int) -> int:
    """Tokens of a sequence. most: what the model was made for. Raises ConfigError where more is asked for."""
    if options.context is not None and options.context > most:
        raise ConfigError(f"context is {options.context}, and the model was made for at most {most} tokens")
    return options.context or most


def token_budget(options: EngineOptions, context: int) -> int:
    """Tokens of a step: no more than all sequences together can bring."""
    budget = options.token_budget or TOKEN_BUDGET.get(options.backend, TOKEN_BUDGET["cuda"])
    return max(min(budget, _power_from(context * places(options))), places(options))


def buckets(options: EngineOptions, context: int, plain: bool = True) -> list[Bucket]:
    """The largest first, as sessions on a queue want to be opened. plain: of programs without adapters, which have more sizes:
    those for a prompt by itself, and on the CPU, where padding takes as long as tokens do, some for short turns and some between
    the powers of two."""
    most, budget = places(options), token_budget(options, context)
    between = plain and options.backend == "cpu"
    decodes = _powers(1, most) + [count for count in DECODES_BETWEEN if between and count < most]
    found = {Bucket(min(count, most), min(count, most), True) for count in decodes}
    found |= {Bucket(count, 1, False) for count in SHORT_TURNS if between and count <= budget}
    for tokens in _powers(min(SMALLEST_CHUNK.get(options.backend, 64), budget), budget):
        tokens = min(tokens, budget)
        found.add(Bucket(tokens, min(most, tokens), False))
        if plain and tokens <= SMALL_CHUNK and most > FEW_ROWS:
            found.add(Bucket(tokens, min(FEW_ROWS, tokens), False))
        if between and tokens > SMALLEST_CHUNK["cpu"]:
            found.add(Bucket(tokens // 4 * 3, min(FEW_ROWS, most), False))
    return sorted(found, key=lambda bucket: (bucket.tokens, bucket.rows, bucket.decode), reverse=True)


def blocks(options: EngineOptions, block_bytes: int, needed: int, sequence_blocks: int) -> int:
    """Blocks of the cache. block_bytes: of all layers. needed: bytes that all else takes which is not there yet.
    sequence_blocks: of a sequence as long as the context. Raises ConfigError where not even a small cache fits."""
    if options.kv_memory is not None:
        count = options.kv_memory // block_bytes
    else:
        count = int(options.kv_share * _free(options, needed) // block_bytes)
    count = min(count, places(options) * sequence_blocks)
    least = 2 * places(options)
    if count < least:
        raise ConfigError(
            f"the key-value cache would have {max(count, 0)} blocks of {block_bytes:,} bytes, and {places(options)} sequences "
            f"need at least {least}", "Give it more memory with kv_memory, or lower max_sequences.",
        )
    return count


def decodes_weights(options: EngineOptions, parameters: int) -> bool:
    """Whether a device keeps the quantised ones of so many parameters decoded, as bf16."""
    if options.backend == "cpu":
        return False
    if options.decode_weights is not None:
        return options.decode_weights
    return 2 * parameters <= DECODED_SHARE * engine.device_info(options.backend, options.device)["free_bytes"]


def _free(options: EngineOptions, needed: int) -> float:
    if options.backend == "cpu":
        return min(HOST_SHARE * (available_host_bytes() - needed), HOST_CAP)
    free = engine.device_info(options.backend, options.device)["free_bytes"]
    return DEVICE_SHARE * (free - needed - DEVICE_RESERVE)


def available_host_bytes() -> int:
    """What the kernel says can be taken without swapping; 4 GiB where it does not say."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            return next(int(line.split()[1]) << 10 for line in file if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return 4 << 30


def sequence_blocks(context: int) -> int:
    return -(-context // BLOCK_SIZE)


def _powers(first: int, last: int) -> list[int]:
    """first, 2 first, 4 first, ... up to the first that is ``last`` or more."""
    found = [first]
    while found[-1] < last:
        found.append(2 * found[-1])
    return found


def _power_from(count: int) -> int:
    return 1 << max(count - 1, 0).bit_length()
