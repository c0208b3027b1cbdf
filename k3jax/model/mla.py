"""The gated Multi-head Latent Attention mixer, without any position embedding."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from k3jax.config import K3Config
from k3jax.model.layers import rms_norm
from k3jax.model.params import MLAParams
from k3jax.quant import matmul
from k3jax.state import latent
from k3jax.state.spans import Spans
from pallas_kernels.mla import mla_absorbed, mla_expanded, prefers_expanded
from pallas_kernels.mla.paged_decode import MAX_TOKENS, mla_paged_decode
from pallas_kernels.mla.paged_prefill import mla_paged_prefill


def mla(
    params: MLAParams,
    config: K3Config,
    x: Float[Array, "row token hidden"],
    spans: Spans,
    pages: Float[Array, "page position latent"] | None,
) -> tuple[Float[Array, "row token hidden"], Float[Array, "page position latent"] | None]:
    """One MLA sublayer over normed inputs; returns its output and the page pool with new latents.

    `pages` None attends within the given tokens and keeps nothing. Source: `KimiMLAAttention` of
    the released modeling file; the shared key part is neither normed nor rotated.
    """
    rows, tokens, _ = x.shape
    heads, rank = config.num_heads, config.kv_lora_rank
    nope, shared, value = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
    q = x
    if params.q_down is not None:
        assert params.q_norm is not None
        q = rms_norm(matmul(x, params.q_down), params.q_norm, config.latent_norm_eps)
    q = matmul(q, params.q).reshape(rows, tokens, heads, nope + shared)
    down = matmul(x, params.kv_down)
    c = rms_norm(down[..., :rank], params.kv_norm, config.latent_norm_eps)
    latents = jnp.concatenate([c, down[..., rank:]], axis=-1)

    kv_up = params.kv_up.reshape(heads, nope + value, rank)
    if pages is None:
        real = spans.token_mask(tokens)[..., None]
        o = _attend_within(q, jnp.where(real, latents, 0), kv_up, jnp.zeros_like(spans.starts))
    else:
        pages = latent.append(pages, spans, latents)
        attend = mla_paged_decode if tokens <= MAX_TOKENS else mla_paged_prefill
        o = attend(
            q,
            pages,
            kv_up,
            jnp.asarray(spans.page_table),
            jnp.asarray(spans.starts),
            jnp.asarray(spans.lengths),
        )
    o = o.reshape(rows, tokens, heads * value)
    if params.gate is not None:
        o = o * jax.nn.sigmoid(matmul(x, params.gate))
    return matmul(o, params.out), pages


def _attend_within(
    q: Float[Array, "row token head query"],
    context: Float[Array, "row token latent"],
    kv_up: Float[Array, "head out latent"],
    starts: Int[Array, "row"],
) -> Float[Array, "row token head value"]:
    """Attention of the given tokens to one another."""
    tokens, rank = context.shape[1], kv_up.shape[2]
    shared = context.shape[2] - rank
    nope = q.shape[3] - shared
    expand = prefers_expanded(
        tokens=tokens,
        context=tokens,
        rank=rank,
        nope=nope,
        shared=shared,
        value=kv_up.shape[1] - nope,
    )
    return (mla_expanded if expand else mla_absorbed)(q, context, kv_up, starts)
