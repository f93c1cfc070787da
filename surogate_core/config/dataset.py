"""Configuration of one data set."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, model_validator

from .fields import ConfigModel

_SHORTHAND = re.compile(
    r"(?P<path>.+?)(:(?P<split>[A-Za-z_][A-Za-z0-9_.-]*(\[[^\]]*\])?))?(#(?P<samples>[0-9][0-9_]*))?"
)


def parse_shorthand(text: str) -> dict[str, Any]:
    """Reads `path`, `path:split`, `path#samples` and `path:split#samples`."""
    match = _SHORTHAND.fullmatch(text)
    if match is None:
        raise ValueError("the path is empty")
    return {key: found for key, found in match.groupdict().items() if found is not None}


class DatasetConfig(ConfigModel):
    """One data set. A text in its place is short for `path`, with `path:split` and `path#samples` understood."""

    path: str = Field(
        min_length=1,
        description="A file (.jsonl, .json, .csv, .txt, .parquet) or folder; relative to the configuration's folder, "
        "then to the working directory.",
    )
    type: str = Field("auto", description="The rows' layout, a data-set format; `auto` decides by the columns.")
    split: str | None = Field(None, description="Which split, and of it which part: `train`, `train[:10]`.")
    subset: str | None = Field(None, description="Which subset (configuration) of a data set that has several.")
    samples: int | None = Field(None, ge=1, description="Use only so many rows; empty: all of them.")
    weight: float = Field(
        1.0, gt=0, description="Passes over its rows in an epoch: 2 takes every row twice, 0.5 half of the rows."
    )
    columns: dict[str, str] = Field(
        default_factory=dict, description="Our column name -> the column's name in the file, where they differ."
    )

    @model_validator(mode="before")
    @classmethod
    def _read_shorthand(cls, value: Any) -> Any:
        return parse_shorthand(value) if isinstance(value, str) else value


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, (str, dict, DatasetConfig)) else value


Datasets = Annotated[list[DatasetConfig], BeforeValidator(_as_list)]
