"""Layers that differ within a model: those that see a window only, and those without positions.

Kinds are "full" and "window"; "_nope" behind either says that q and k are not rotated.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from surogate_core.errors import WeightError

if TYPE_CHECKING:
    from surogate_core.families import HFConfig

    from .family import LlamaFamily, LlamaHyperparameters
    from .switches import Switches

FULL, SLIDING = "full_attention", "sliding_attention"
SMOLLM3_INTERVAL = 4
"""Every how many layers one is without positions in GGUF files of smollm3, which have no key for it."""


def kind_of(sliding: bool, nope: bool) -> str:
    return ("window" if sliding else "full") + ("_nope" if nope else "")


def is_sliding(kind: str) -> bool:
    return kind.startswith("window")


def is_nope(kind: str) -> bool:
    return kind.endswith("_nope")


def read_layers(settings: HFConfig, switches: Switches, num_layers: int) -> dict[str, Any]:
    """Fields window and kinds."""
    if switches.windows == "no":
        settings.only("sliding_window", None)
    window = settings.count("sliding_window") if settings.get("sliding_window") else 0
    nope = [False] * num_layers
    if switches.nope:
        nope = _without_positions(settings, num_layers)
        window = window if settings.flag("use_sliding_window") else 0
    types = [SLIDING if window else FULL] * num_layers
    if switches.windows == "layer_types":
        types = settings.layer_types((FULL, SLIDING), num_layers, _usual_types(switches, window, nope))
    if SLIDING in types and not window:
        raise WeightError("config.json: layer_types has 'sliding_attention', but no sliding_window is set and in use")
    return {"window": window if SLIDING in types else 0,
            "kinds": tuple(kind_of(each == SLIDING, without) for each, without in zip(types, nope, strict=True))}


def _usual_types(switches: Switches, window: int, nope: list[bool]) -> list[str]:
    if not window:
        return [FULL] * len(nope)
    if switches.nope:
        return [SLIDING if without else FULL for without in nope]
    every = switches.full_every
    return [FULL if every and index % every == 0 else SLIDING for index in range(len(nope))]


def _without_positions(settings: HFConfig, num_layers: int) -> list[bool]:
    """From no_rope_layers, whose ones mean that a layer does rotate, else from no_rope_layer_interval."""
    given = settings.get("no_rope_layers")
    if given is None:
        interval = settings.count("no_rope_layer_interval", SMOLLM3_INTERVAL)
        return [(index + 1) % interval == 0 for index in range(num_layers)]
    if len(given) < num_layers or any(each not in (0, 1) for each in given):
        raise WeightError(f"config.json: no_rope_layers is {given!r}, not a 0 or 1 for each of {num_layers} layers")
    return [not rotated for rotated in given[:num_layers]]


def write_layers(h: LlamaHyperparameters, family: LlamaFamily) -> dict[str, Any]:
    """Keys of config.json. WeightError for what the family's architecture cannot say."""
    switches = family.switches
    sliding, nope = [is_sliding(kind) for kind in h.kinds], [is_nope(kind) for kind in h.kinds]
    mixed = any(sliding) and not all(sliding)
    unsaid = any(sliding) if switches.windows == "no" else mixed and switches.windows == "all"
    if unsaid or (any(nope) and not switches.nope):
        kinds = ", ".join(dict.fromkeys(h.kinds))
        raise WeightError(f"{family.architectures[0]} has no setting for layers of kinds {kinds}")
    if switches.windows == "no":
        return {}
    config: dict[str, Any] = {"sliding_window": h.window or None}
    if switches.windows == "layer_types":
        config["layer_types"] = [SLIDING if each else FULL for each in sliding]
    if switches.nope:
        config |= {"use_sliding_window": any(sliding), "no_rope_layers": [int(not without) for without in nope]}
    return config


def gguf_kinds(switches: Switches, window: int, num_layers: int) -> tuple[str, ...]:
    """The kinds of a GGUF file's layers."""
    return tuple(kind_of(window > 0, switches.nope and (i + 1) % SMOLLM3_INTERVAL == 0) for i in range(num_layers))
