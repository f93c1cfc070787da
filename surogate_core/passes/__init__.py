"""Graph -> graph rewrites, one file each. Every pass changes the graph in place, records its name and is checked."""

from .adapter_bank import BankSpec, adapter_bank, bank_names
from .autodiff import autodiff
from .dead_code import dead_code
from .feed_tokens import feed_tokens
from .fuse import fuse
from .fuse_low_rank import fuse_low_rank
from .fuse_norm_rope import fuse_norm_rope
from .fuse_norms import fuse_norms
from .fuse_projections import fuse_projections
from .fuse_rope import fuse_rope
from .join_low_rank import join_low_rank
from .join_ropes import join_ropes
from .lora import LoraSpec, lora
from .paged_kv import paged_kv
from .precision import RECIPES, Recipe, precision
from .recompute import recompute
from .widen_products import widen_products, widened_names

__all__ = [
    "BankSpec", "LoraSpec", "RECIPES", "Recipe", "adapter_bank", "autodiff", "bank_names", "dead_code", "feed_tokens",
    "fuse", "fuse_low_rank", "fuse_norm_rope", "fuse_norms", "fuse_projections", "fuse_rope", "join_low_rank",
    "join_ropes", "lora", "paged_kv", "precision", "recompute", "widen_products", "widened_names",
]
