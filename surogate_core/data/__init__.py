"""Data: rows from files, chat templates, label masks, packing, and the loader that feeds training.

`build_dataset` reads and tokenizes, `Loader` makes micro-batches; `Encoder` in between decides what is trained on.
"""

from __future__ import annotations

from .adopted import adopt_choice, adopt_saved_template, adopt_template
from .dataset import Ledger, TokenDataset, build_dataset, concatenate, encode_rows, split_validation
from .formats import DatasetFormat, Example
from .loader import IGNORED, Batch, Loader, Step
from .masks import Encoded, Encoder, encode_rendered, explain_mask, print_mask
from .sources import DatasetSpec, Row, read_rows
from .template import ChatTemplate, load_template

__all__ = [
    "IGNORED", "Batch", "ChatTemplate", "DatasetFormat", "DatasetSpec", "Encoded", "Encoder", "Example", "Ledger",
    "Loader", "Row", "Step", "TokenDataset", "adopt_choice", "adopt_saved_template", "adopt_template", "build_dataset",
    "concatenate", "encode_rendered", "encode_rows", "explain_mask", "load_template", "print_mask", "read_rows",
    "split_validation",
]
