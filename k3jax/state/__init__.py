"""Device state as explicit pytrees: recurrent slots, the paged latent cache, rows' addresses."""

from k3jax.state.decode import DecodeState
from k3jax.state.latent import LatentCache
from k3jax.state.recurrent import RecurrentState
from k3jax.state.spans import Spans

__all__ = ["DecodeState", "LatentCache", "RecurrentState", "Spans"]
