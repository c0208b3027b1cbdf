"""Multi-head Latent Attention over a gathered latent context: absorbed and expanded forms."""

from pallas_kernels.mla.attention_xla import mla_absorbed, mla_expanded, prefers_expanded

__all__ = ["mla_absorbed", "mla_expanded", "prefers_expanded"]
