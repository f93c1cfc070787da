"""What is given by calls, for those who take it one after another."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")


async def pulled(read: Callable[[Callable[[list[T]], None]], Awaitable[None]]) -> AsyncGenerator[T, None]:
    """All that ``read`` gives to what it is called with. Closing this cancels the read; raises what that raises."""
    given: asyncio.Queue[list[T] | None] = asyncio.Queue()
    reading = asyncio.ensure_future(read(given.put_nowait))
    reading.add_done_callback(lambda _: given.put_nowait(None))
    try:
        while (some := await given.get()) is not None:
            for each in some:
                yield each
        await reading
    finally:
        reading.cancel()
        await asyncio.wait({reading})
