"""Multi-head Latent Attention over gathered or paged latents: absorbed and expanded forms."""

from pallas_kernels.mla.attention_xla import mla_absorbed, mla_expanded, prefers_expanded
from pallas_kernels.mla.paged_xla import mla_paged

__all__ = ["mla_absorbed", "mla_expanded", "mla_paged", "prefers_expanded"]
