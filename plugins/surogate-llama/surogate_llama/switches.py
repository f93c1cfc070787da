"""What sets Llama's relatives apart: a record of switches, and a table of the published families that set them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from surogate_core.families import HFConfig

    from .family import LlamaHyperparameters


@dataclass(frozen=True)
class Multipliers:
    """Constant factors by which families of maximal-update parametrisation scale what Llama leaves as it is.

    read: from config.json to fields of LlamaHyperparameters. write: back. gguf: field -> key of GGUF metadata.
    """

    read: Callable[[HFConfig, Mapping[str, Any]], dict[str, Any]]
    write: Callable[[LlamaHyperparameters], dict[str, Any]]
    gguf: Mapping[str, str]


@dataclass(frozen=True)
class Switches:
    """Of a family; as they are by default, it is Llama.

    defaults: what `transformers` takes for keys that a config.json leaves out.
    biases: the keys that give q, k and v a bias, o one, and the MLP one; None where the family has none.
    windows: which layers see a window only: "no" layer, "all" where there is a sliding_window, or those of "layer_types".
    full_every: where "layer_types" is left out: every how many layers one sees everything, from the first on; 0: none.
    nope: layers may go without positions (no_rope_layers); these slide where layer_types is left out.
    rope_base: where no rope_theta is given. interleaved: q and k are rotated by pairs of neighbours, not by halves.
    gguf: the architecture of GGUF files that are written.
    only: other keys that the family's `transformers` or own code looks at, and the values that mean "not so".
    """

    defaults: Mapping[str, Any] = field(default_factory=lambda: {"max_position_embeddings": 2048})
    biases: tuple[str | None, str | None, str | None] = ("attention_bias", "attention_bias", "mlp_bias")
    windows: str = "no"
    full_every: int = 0
    nope: bool = False
    rope_base: float = 10000.0
    interleaved: bool = False
    multipliers: Multipliers | None = None
    gguf: str = "llama"
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)


def _read_granite(settings: HFConfig, fields: Mapping[str, Any]) -> dict[str, Any]:
    return {"embed_scale": settings.number("embedding_multiplier", 1.0),
            "residual_scale": settings.number("residual_multiplier", 1.0),
            "logit_divisor": settings.number("logits_scaling", 1.0),
            "attention_scale": settings.number("attention_multiplier", 1.0)}


def _write_granite(h: LlamaHyperparameters) -> dict[str, Any]:
    attention = h.head_dim**-0.5 if h.attention_scale is None else h.attention_scale
    return {"embedding_multiplier": h.embed_scale, "residual_multiplier": h.residual_scale,
            "logits_scaling": h.logit_divisor, "attention_multiplier": attention}


def _read_minicpm(settings: HFConfig, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The keys have no defaults: versions of the family's own code disagree on them, and published checkpoints say them."""
    return {"embed_scale": settings.number("scale_emb"),
            "residual_scale": settings.number("scale_depth") / fields["num_layers"] ** 0.5,
            "logit_divisor": fields["hidden_size"] / settings.count("dim_model_base")}


def _write_minicpm(h: LlamaHyperparameters) -> dict[str, Any]:
    """Seven digits of scale_depth: what is left of it in GGUF files, and more than configurations have."""
    return {"scale_emb": h.embed_scale, "scale_depth": float(f"{h.residual_scale * h.num_layers ** 0.5:.7g}"),
            "dim_model_base": round(h.hidden_size / h.logit_divisor)}


_GGUF_SCALES = {"embed_scale": "embedding_scale", "residual_scale": "residual_scale", "logit_divisor": "logit_scale"}
GRANITE = Multipliers(_read_granite, _write_granite, {**_GGUF_SCALES, "attention_scale": "attention.scale"})
MINICPM = Multipliers(_read_minicpm, _write_minicpm, _GGUF_SCALES)

_CWM_ROPE = {"rope_type": "llama3", "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
             "original_max_position_embeddings": 8192}
_MISTRAL = {"max_position_embeddings": 131072, "sliding_window": 4096, "num_key_value_heads": 8}
_LONG_128 = {"max_position_embeddings": 131072, "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5}
_NO_BIAS = (None, None, None)

# model_type -> architecture of config.json, or several of which the first is written; those of GGUF files that are read;
# switches.
PUBLISHED: dict[str, tuple[str | tuple[str, ...], tuple[str, ...], Switches]] = {
    "llama": ("LlamaForCausalLM", ("llama",), Switches()),
    "mistral": ("MistralForCausalLM", ("mistral",), Switches(_MISTRAL, _NO_BIAS, windows="all")),
    "ministral": ("MinistralForCausalLM", (), Switches(_MISTRAL, _NO_BIAS, windows="layer_types")),
    "smollm3": ("SmolLM3ForCausalLM", ("smollm3",), Switches(
        {"max_position_embeddings": 32768, "num_key_value_heads": 4, "tie_word_embeddings": True},
        windows="layer_types", nope=True, rope_base=2e6, gguf="smollm3")),
    "granite": ("GraniteForCausalLM", ("granite",), Switches(multipliers=GRANITE, gguf="granite")),
    "minicpm": ("MiniCPMForCausalLM", ("minicpm",), Switches(
        {"max_position_embeddings": 2048, "tie_word_embeddings": True}, ("attention_bias", "attention_bias", None),
        multipliers=MINICPM, gguf="minicpm", only={"sparse_config": (None,), "num_experts": (None, 0)})),
    "iquestcoder": ("IQuestCoderForCausalLM", (), Switches(
        _LONG_128, only={"clip_qkv": (None,), "use_sliding_window": (None, False)})),
    "cwm": ("CwmForCausalLM", (), Switches(
        {**_LONG_128, "sliding_window": 8192, "rope_scaling": _CWM_ROPE}, (None, None, "mlp_bias"),
        windows="layer_types", full_every=4, rope_base=1e6)),
    "ernie4_5": (("Ernie4_5ForCausalLM", "Ernie4_5_ForCausalLM"), ("ernie4_5",), Switches(
        {**_LONG_128, "num_key_value_heads": 2, "tie_word_embeddings": True}, ("use_bias", "use_bias", "use_bias"),
        rope_base=5e5, interleaved=True, gguf="ernie4_5")),
    "helium": ("HeliumForCausalLM", (), Switches(
        {"max_position_embeddings": 4096, "num_key_value_heads": 20, "head_dim": 128, "rms_norm_eps": 1e-8},
        ("attention_bias", None, "mlp_bias"), rope_base=1e5, interleaved=True)),
}  # fmt: skip
