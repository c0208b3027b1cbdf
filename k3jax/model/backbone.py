"""The forward pass: embedding, layers over depth, final norm, logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Int32

from k3jax.config import K3Config
from k3jax.model.attn_res import next_input
from k3jax.model.kda import KDATrace, Pools, kda, replay_kda, verify_kda
from k3jax.model.layers import mlp
from k3jax.model.mla import mla
from k3jax.model.moe import moe
from k3jax.model.params import K3Params, KDAParams, MoEParams
from k3jax.quant import matmul
from k3jax.state import DecodeState, LatentCache, RecurrentState, Spans

Hidden = Float[Array, "row token hidden"]
Pages = Float[Array, "page position latent"]


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
    h, kept, pools, pages = _layers(params, config, x, spans, state, kda, keep_layers)
    if state is not None:
        state = DecodeState(recurrent=_recurrent(pools), latent=_latent(pages))
    return h, kept, state


def verify(
    params: K3Params, config: K3Config, x: Hidden, spans: Spans, state: DecodeState
) -> tuple[Hidden, tuple[KDATrace, ...], DecodeState]:
    """`forward` over embedded tokens that may yet be refused, at most 8 per row.

    Returns the final normed hidden states, what `replay` needs of each KDA layer, and the state
    with the tokens' latents in its pages and its recurrent part as it was. Latents of refused
    tokens lie past the sequence's end, where nothing reads before later tokens replace them.
    """
    h, _, traces, pages = _layers(params, config, x, spans, state, verify_kda, keep_layers=False)
    return h, tuple(traces), state.replace(latent=_latent(pages))


def replay(
    traces: tuple[KDATrace, ...], counts: Int[Array, "row"], spans: Spans, state: DecodeState
) -> DecodeState:
    """The state after the first `counts` tokens of each row that `verify` ran.

    `spans` are those verified and `state` is what `verify` returned. Padding rows write nothing.
    """
    old = state.recurrent
    pools = [replay_kda(t, counts, spans, old.layer(i)) for i, t in enumerate(traces)]
    return state.replace(recurrent=_recurrent(pools))


def _layers[R](
    params: K3Params,
    config: K3Config,
    x: Hidden,
    spans: Spans,
    state: DecodeState | None,
    mix_kda: Callable[..., tuple[Hidden, R]],
    keep_layers: bool,
) -> tuple[Hidden, tuple[Hidden, ...], list[R], list[Pages | None]]:
    """Hidden states, the layers' values, what `mix_kda` left in each KDA layer, and all pages."""
    real = spans.token_mask(x.shape[1])
    bank: list[Hidden] = []
    kept: list[Hidden] = []
    left: list[R] = []
    pages: list[Pages | None] = []
    y: Hidden | None = None  # of the last sublayer, not yet in x
    for layer, p in enumerate(params.layers):
        x, h = next_input(p.mixer_mix, config, p.mixer_norm, bank, x, y)
        restart = config.starts_depth_block(layer)
        if restart:
            bank.append(x)
        if isinstance(p.mixer, KDAParams):
            pools = state.recurrent.layer(len(left)) if state else None
            y, result = mix_kda(p.mixer, config, h, spans, pools)
            left.append(result)
        else:
            pool = state.latent.pages[len(pages)] if state else None
            y, pool = mla(p.mixer, config, h, spans, pool)
            pages.append(pool)
        x, y = (y, None) if restart else (x, y)
        x, h = next_input(p.ffn_mix, config, p.ffn_norm, bank, x, y)
        if isinstance(p.ffn, MoEParams):
            y = moe(p.ffn, config, h, real)
        else:
            y = mlp(p.ffn, config, h)
        if keep_layers:
            kept.append(x + y)
    _, h = next_input(params.final_mix, config, params.final_norm, bank, x, y)
    return h, tuple(kept), left, pages


def _recurrent(pools: Sequence[Pools | None]) -> RecurrentState:
    real = [pair for pair in pools if pair is not None]
    return RecurrentState(matrices=tuple(m for m, _ in real), windows=tuple(w for _, w in real))


def _latent(pages: Sequence[Pages | None]) -> LatentCache:
    return LatentCache(pages=tuple(pool for pool in pages if pool is not None))


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
