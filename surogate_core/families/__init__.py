"""What authors of families share: reading and writing the settings and the weight names of decoders.

Nothing here knows a family by name: a family says what is its own, and takes the rest from here.
"""

from .decoder import DecoderHyperparameters
from .gguf_metadata import GGUFMetadata, read_gguf_decoder, write_gguf_decoder
from .hf_config import HFConfig, read_hf_decoder, write_hf_decoder, write_hf_rope
from .names import GGUF_NORMS, HF_NORMS, LINEARS, gguf_decoder_names, hf_decoder_names
from .rope_factors import rope_factor_tensors

__all__ = [
    "DecoderHyperparameters", "GGUFMetadata", "GGUF_NORMS", "HFConfig", "HF_NORMS", "LINEARS", "gguf_decoder_names",
    "hf_decoder_names", "read_gguf_decoder", "read_hf_decoder", "rope_factor_tensors", "write_gguf_decoder",
    "write_hf_decoder", "write_hf_rope",
]
