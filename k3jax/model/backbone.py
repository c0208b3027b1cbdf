"""The forward pass: embedding, layers over depth, final norm, logits."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from k3jax.config import K3Config
from k3jax.model.attn_res import next_input
from k3jax.model.kda import kda
from k3jax.model.layers import mlp
from k3jax.model.mla import mla
from k3jax.model.moe import moe
from k3jax.model.params import K3Params, KDAParams, MoEParams
from k3jax.quant import matmul
from k3jax.state import DecodeState, LatentCache, RecurrentState, Spans

Hidden = Float[Array, "row token hidden"]


def embed(params: K3Params, tokens: Int32[Array, "row token"]) -> Hidden:
    """Token embeddings; nothing is scaled and no position is added."""
    return jnp.take(params.embed, tokens, axis=0, mode="clip")


def forward(
    params: K3Params,
    config: K3Config,
    x: Hidden,
    spans: Spans,
    state: DecodeState | None,
    *,
    keep_layers: bool = False,
) -> tuple[Hidden, tuple[Hidden, ...], DecodeState | None]:
    """All layers over embedded tokens.

    Returns the final normed hidden states, the value each layer returned (empty unless
    `keep_layers`; with Attention Residuals it is the running sum, as in the released code), and
    the state after the spans. `state` None runs whole sequences and keeps nothing.
    """
    real = spans.token_mask(x.shape[1])
    matrices = list(state.recurrent.matrices) if state else []
    windows = list(state.recurrent.windows) if state else []
    pages = list(state.latent.pages) if state else []
    bank: list[Hidden] = []
    kept: list[Hidden] = []
    kda_seen = mla_seen = 0
    y: Hidden | None = None  # of the last sublayer, not yet in x
    for layer, p in enumerate(params.layers):
        x, h = next_input(p.mixer_mix, config, p.mixer_norm, bank, x, y)
        restart = config.starts_depth_block(layer)
        if restart:
            bank.append(x)
        if isinstance(p.mixer, KDAParams):
            pools = (matrices[kda_seen], windows[kda_seen]) if state else None
            y, pools = kda(p.mixer, config, h, spans, pools)
            if pools is not None:
                matrices[kda_seen], windows[kda_seen] = pools
            kda_seen += 1
        else:
            y, pool = mla(p.mixer, config, h, spans, pages[mla_seen] if state else None)
            if pool is not None:
                pages[mla_seen] = pool
            mla_seen += 1
        x, y = (y, None) if restart else (x, y)
        x, h = next_input(p.ffn_mix, config, p.ffn_norm, bank, x, y)
        if isinstance(p.ffn, MoEParams):
            y = moe(p.ffn, config, h, real)
        else:
            y = mlp(p.ffn, config, h)
        if keep_layers:
            kept.append(x + y)
    _, h = next_input(params.final_mix, config, params.final_norm, bank, x, y)
    if state is not None:
        state = DecodeState(
            recurrent=RecurrentState(matrices=tuple(matrices), windows=tuple(windows)),
            latent=LatentCache(pages=tuple(pages)),
        )
    return h, tuple(kept), state


def logits(params: K3Params, hidden: Float[Array, "*batch hidden"]) -> Float[Array, "*batch vocab"]:
    """Unscaled vocabulary scores of final hidden states, in their dtype."""
    return matmul(hidden, params.lm_head)


def forward_logits(
    params: K3Params,
    config: K3Config,
    tokens: Int32[Array, "row token"],
    lengths: Int32[Array, "row"] | None = None,
) -> Float[Array, "row token vocab"]:
    """Logits of whole right-padded sequences without any kept state; differentiable.

    `lengths` None means that every position is real.
    """
    if lengths is None:
        lengths = jnp.full((tokens.shape[0],), tokens.shape[1], jnp.int32)
    hidden, _, _ = forward(params, config, embed(params, tokens), Spans.fresh(lengths), None)
    return logits(params, hidden)
