"""A served model that makes vectors of texts and writes none: it has no head, no key-value cache and no loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from surogate_core.model import LoadedModel
from surogate_core.plugins.manager import get_manager
from surogate_core.weights.embedding import Pooling

from .engine import EngineOptions
from .engine.embedding import Embedder, VectorRuntime
from .types import Generation, Refused, Take


class EmbeddingModel:
    """What HTTP asks of a `ServedModel`, as far as there is something to ask; the rest is `Refused`, and says why."""

    writes_text = False

    def __init__(self, name: str, model: LoadedModel, options: EngineOptions = EngineOptions()) -> None:
        """Raises SurogateError where the model cannot be served here."""
        self.name, self.created, self.options = name, int(time.time()), options
        self.main, self.names, self.adapters = (name,), [name], list[str]()
        self.tokenizer, self.dead = model.tokenizer(), None
        self.vectors = Embedder(VectorRuntime(model, get_manager().recipes[options.recipe], options))
        self.context = self.vectors.longest

    async def embed(self, prompts: Sequence[Sequence[int]], pooling: Pooling | None = None) -> np.ndarray:
        """As `ServedModel.embed`."""
        return await asyncio.to_thread(self.vectors.embed, prompts, pooling)

    async def read(self, generation: Generation, take: Take) -> NoReturn:
        self._refuse()

    def generate_many(self, generations: Sequence[Generation]) -> NoReturn:
        self._refuse()

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Any = None, **options: Any) -> NoReturn:
        self._refuse()

    @property
    def parser(self) -> NoReturn:
        self._refuse()

    @property
    def grammars(self) -> NoReturn:
        self._refuse()

    def parser_named(self, name: str) -> None:
        """A parser of answers concerns others."""

    def adapter_details(self) -> list[dict[str, object]]:
        return []

    async def load_adapter(self, name: str, path: str | Path) -> NoReturn:
        raise Refused(f"{self.name} makes vectors of texts: it takes no adapters", 400, "no_adapters", "model")

    async def unload_adapter(self, name: str) -> NoReturn:
        raise Refused(f"there is no adapter {name!r}", 404, "adapter_not_found", "name")

    def stats(self) -> dict[str, Any]:
        return {"running": 0, "waiting": 0, "adapters": [], "context": self.context}

    def drain(self, timeout: float) -> bool:
        return True

    def close(self, timeout: float = 0.0) -> None:
        """Nothing runs by itself."""

    def _refuse(self) -> NoReturn:
        raise Refused(
            f"{self.name} makes vectors of texts and cannot write any: ask /v1/embeddings", 400, "embeddings_only",
            "model",
        )
