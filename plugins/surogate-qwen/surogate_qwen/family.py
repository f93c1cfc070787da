"""The families of Qwen's dense models, and what their files say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from surogate_core.dsl import Family, Model
from surogate_core.errors import WeightError
from surogate_core.families import (
    GGUF_NORMS, HF_NORMS, DecoderHyperparameters, GGUFMetadata, HFConfig, gguf_decoder_names, hf_decoder_names,
    read_gguf_decoder, read_hf_decoder, rope_factor_tensors, write_gguf_decoder, write_hf_decoder, write_hf_rope,
)
from surogate_core.weights.name_map import NameMap

from .model import Qwen

FULL, SLIDING = "full_attention", "sliding_attention"

# What transformers takes for a key that a config.json leaves out.
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 32, "max_position_embeddings": 32768, "sliding_window": 4096,
    "max_window_layers": 28,
}
_NORM = "model.norm.weight"
# Keys that change the arithmetic in a way that these models do not have, and the values that mean "not so".
_ONLY: dict[str, tuple[Any, ...]] = {
    "partial_rotary_factor": (None, 1.0), "use_mrope": (None, False), "num_experts": (None, 0),
    "is_causal": (None, True), "dual_chunk_attention_config": (None,),
}


@dataclass(frozen=True)
class QwenHyperparameters(DecoderHyperparameters):
    """layer_types: FULL or SLIDING, by layer. window: how many tokens back (itself included) a token of a sliding layer
    sees; 0 where none slides. qk_norm: each head of q and k is normed before it is rotated. head: False for a checkpoint
    that makes vectors and no text."""

    layer_types: tuple[str, ...] = ()
    window: int = 0
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False
    head: bool = True


class QwenFamily(Family):
    """``name`` is the model_type of config.json and the architecture of GGUF files. architectures: with a head, and without
    one. qk_norm: whether queries and keys are normed; then biases are a setting, and otherwise q, k and v always have
    them."""

    # Embedding models hold the body alone, whichever of the two architectures their config.json names.
    hf_prefixes = {name: f"model.{name}" for name in ("embed_tokens.", "layers.", "norm.")}

    def __init__(self, name: str, architectures: tuple[str, ...], qk_norm: bool) -> None:
        self.name, self.qk_norm = name, qk_norm
        self.architectures, self.gguf_architectures = architectures, (name,)

    def from_hf(self, config: Mapping[str, Any]) -> QwenHyperparameters:
        settings = HFConfig(config, self.name, _DEFAULTS | ({"head_dim": 128} if self.qk_norm else {}))
        for key, values in _ONLY.items():
            settings.only(key, *values)
        if not self.qk_norm:
            settings.only("attention_bias", None, True)
        fields = read_hf_decoder(settings)
        fields |= settings.rope(fields["head_dim"], fields["max_positions"])
        fields |= _read_layers(settings, fields["num_layers"])
        out_bias = self.qk_norm and settings.flag("attention_bias")
        qkv_bias = out_bias or not self.qk_norm
        return QwenHyperparameters(**fields, qkv_bias=qkv_bias, out_bias=out_bias, qk_norm=self.qk_norm)

    def from_folder(self, store) -> QwenHyperparameters:
        """Embedding models whose head would have a weight of its own are stored without it."""
        h = self.from_hf(store.config)
        body = self.architectures[1] in store.config.get("architectures", ()) or store.stored_name(_NORM) != _NORM
        return replace(h, head=h.tied or "lm_head.weight" in store or not body)

    def from_gguf(self, store) -> QwenHyperparameters:
        metadata = GGUFMetadata(store)
        fields = read_gguf_decoder(metadata)
        fields |= metadata.rope(fields["head_dim"])
        if fields["rope_dims"] != fields["head_dim"]:
            raise WeightError(f"{store.path}: {self.name}.rope.dimension_count is {fields['rope_dims']}; a {self.name} "
                              f"model rotates all {fields['head_dim']} dimensions of a head")
        kinds = (FULL,) * fields["num_layers"]
        return QwenHyperparameters(**fields, layer_types=kinds, qkv_bias=not self.qk_norm, qk_norm=self.qk_norm)

    def model(self, hyperparameters: QwenHyperparameters) -> Model:
        return Qwen(hyperparameters)

    def hf_names(self, hyperparameters: QwenHyperparameters) -> NameMap:
        qk_norms = {"attn.q_norm": "self_attn.q_norm", "attn.k_norm": "self_attn.k_norm"} if self.qk_norm else {}
        return hf_decoder_names({**HF_NORMS, **qk_norms})

    def gguf_names(self, hyperparameters: QwenHyperparameters) -> NameMap:
        """Rows of q and k lie as in Hugging Face's files."""
        qk_norms = {"attn.q_norm": "attn_q_norm", "attn.k_norm": "attn_k_norm"} if self.qk_norm else {}
        return gguf_decoder_names({**GGUF_NORMS, **qk_norms})

    def hf_config(self, hyperparameters: QwenHyperparameters) -> dict[str, Any]:
        h = hyperparameters
        slides = [kind == SLIDING for kind in h.layer_types]
        config = write_hf_decoder(h, self.name, self.architectures[0 if h.head else 1]) | write_hf_rope(h.rope)
        if self.qk_norm:
            config["attention_bias"] = h.out_bias
        return config | {
            "use_sliding_window": any(slides),
            "sliding_window": h.window or None,
            "max_window_layers": slides.index(True) if any(slides) else h.num_layers,
            "layer_types": list(h.layer_types),
        }

    def gguf_metadata(self, hyperparameters: QwenHyperparameters) -> dict[str, Any]:
        """WeightError for what readers of these files would not see."""
        h = hyperparameters
        for what, found in (("sliding windows", h.window), ("a bias of the attention's output", h.out_bias),
                            (f"rotary scaling as of {dict(h.rope_scaling)}", rope_factor_tensors(h.rope))):
            if found:
                raise WeightError(f"{what}: GGUF files of architecture {self.name} have no place for it",
                                  "Export to a Hugging Face folder.")
        return write_gguf_decoder(h, self.name)

    def tiny_configs(self) -> dict[str, dict[str, Any]]:
        from .tiny import VARIANTS

        return VARIANTS[self.name]

    def presets(self) -> Mapping[str, Mapping[str, Any]]:
        from .presets import PRESETS

        return PRESETS[self.name]


def _read_layers(settings: HFConfig, num_layers: int) -> dict[str, Any]:
    """Fields layer_types and window. A window is off, whatever it says, unless use_sliding_window is true."""
    slides = settings.flag("use_sliding_window") and settings.get("sliding_window") is not None
    window = settings.count("sliding_window") if slides else 0
    first = settings.get("max_window_layers")
    if type(first) is not int or first < 0:
        raise WeightError(f"config.json: max_window_layers is {first!r}, not a number of layers")
    default = [SLIDING if window and layer >= first else FULL for layer in range(num_layers)]
    types = settings.layer_types((FULL, SLIDING), num_layers, default)
    if SLIDING in types and not window:
        raise WeightError("config.json: layer_types has 'sliding_attention', but use_sliding_window and sliding_window "
                          "give these layers no window")
    return {"layer_types": tuple(types), "window": window if SLIDING in types else 0}


FAMILIES = (
    QwenFamily("qwen2", ("Qwen2ForCausalLM", "Qwen2Model"), qk_norm=False),
    QwenFamily("qwen3", ("Qwen3ForCausalLM", "Qwen3Model"), qk_norm=True),
)
