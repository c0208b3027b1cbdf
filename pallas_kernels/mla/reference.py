"""What MLA computes, expanded and without blocking."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def mla_reference(
    q: Float[Array, "row token head query"],
    context: Float[Array, "row context latent"],
    kv_up: Float[Array, "head out latent"],
    starts: Int[Array, "row"],
) -> Float[Array, "row token head value"]:
    """Causal attention of keys and values expanded from the latents, float32.

    With R = `kv_up.shape[2]`, a latent row is `[c | r]`: c of width R, r shared by all heads and
    not rotated. `kv_up[h]` holds the head's key rows (as many as q has beyond r), then its value
    rows. Key = `[kv_up_key c | r]`, value = `kv_up_value c`, and the scale is 1/sqrt(width of q).
    Query t of row b sits at position `starts[b] + t` and sees context positions up to its own.
    """
    rank = kv_up.shape[2]
    shared = context.shape[2] - rank
    nope = q.shape[-1] - shared
    q, context, kv_up = (a.astype(jnp.float32) for a in (q, context, kv_up))
    expanded = jnp.einsum("bcr,hor->bcho", context[..., :rank], kv_up, precision="highest")
    keys, values = expanded[..., :nope], expanded[..., nope:]
    scores = jnp.einsum("bthd,bchd->bhtc", q[..., :nope], keys, precision="highest")
    scores += jnp.einsum("bthd,bcd->bhtc", q[..., nope:], context[..., rank:], precision="highest")
    position = starts[:, None] + jnp.arange(q.shape[1])
    seen = jnp.arange(context.shape[1]) <= position[..., None]
    scores = jnp.where(seen[:, None], scores / jnp.sqrt(float(q.shape[-1])), -jnp.inf)
    return jnp.einsum("bhtc,bchd->bthd", jax.nn.softmax(scores), values, precision="highest")
