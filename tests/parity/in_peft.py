"""Variants under adapters, in PEFT's hands."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from surogate_core.testing.parity import Parity
from surogate_core.train.prepare import linear_roles


def base_of(parity: Parity) -> Any:
    """A fresh copy of the base in transformers."""
    import torch
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(parity.folder, attn_implementation="eager", dtype=torch.float32)


def linears(parity: Parity) -> list[str]:
    """Our names of every linear weight of the stack."""
    roles = linear_roles(parity.loaded)
    return [name for name, parameter in parity.loaded.dsl().parameters() if parameter.role in roles]


def in_peft(parity: Parity, **settings: Any) -> Any:
    """A PEFT model over a fresh copy of the base, A and B random: on every linear of the stack, or as ``settings`` of PEFT's
    LoraConfig have it."""
    peft = pytest.importorskip("peft", reason="compares with PEFT: pip install 'surogate-core[test]'")
    names = parity.loaded.family.hf_names(parity.loaded.hyperparameters)
    targets = [names.file_names(weight)[0].removesuffix(".weight") for weight in linears(parity)]
    config = peft.LoraConfig(**{"r": 4, "lora_alpha": 6, "target_modules": targets, **settings})
    return randomised(peft.get_peft_model(base_of(parity), config))


def randomised(model: Any, scale: float = 0.1) -> Any:
    """A PEFT model whose A and B are drawn anew."""
    import torch

    torch.manual_seed(5)
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            parameter.data.normal_(0, scale)
    return model.eval()


def of_peft(parity: Parity, model: Any) -> Parity:
    """The same with ``model`` as the reference."""
    return replace(parity, reference=model)


def peft_logits(parity: Parity, model: Any) -> np.ndarray:
    return of_peft(parity, model).reference_logits()


def saved(model: Any, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder
