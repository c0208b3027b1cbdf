"""The gated delta rule over chunks of tokens, as large matrix products, for prefill and training.

``reference.kda_recurrent`` states what is computed. For a chunk of ``N`` tokens that enters with state
``S``, let ``G_i`` be the sum of the log decays of tokens 1..i, per key channel, and::

    A_ij = beta_i Σ_c k_ic k_jc exp(G_ic − G_jc)   for j < i     (what token i recalls of token j's write)
    P_ij =        Σ_c q_ic k_jc exp(G_ic − G_jc)   for j ≤ i     (what token i reads of token j's write)
    M    = (I + A)⁻¹
    U    = M diag(beta) (V − (exp(G) ⊙ K) S)                      the values really written
    O    = (exp(G) ⊙ Q) S + P U
    S'   = diag(exp(G_N)) S + (exp(G_N − G) ⊙ K)ᵀ U

Everything that does not touch ``S`` is computed for all chunks at once; only two products per chunk are
sequential. Every exponent is a sum of log decays over a run of tokens, so it is never positive and loses
no digits to cancellation, however strong the decay: ``A`` and ``P`` are built from blocks whose rows are
measured from the block's middle forward and whose columns from the middle backward, doubling the block
from one token to the whole chunk. ``M`` is merged from its halves in the same order.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

HIGHEST = lax.Precision.HIGHEST


def kda_chunk(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H V"],
    log_decay: Float[Array, "B T H K"],
    beta: Float[Array, "B T H"],
    initial_state: Float[Array, "B H K V"],
    *,
    chunk_size: int,
) -> tuple[Float[Array, "B T H V"], Float[Array, "B H K V"]]:
    """Chunked ``reference.kda_recurrent``; ``chunk_size`` is a power of two."""
    rows, tokens, heads, _ = k.shape
    chunks = -(-tokens // chunk_size)
    padding = chunks * chunk_size - tokens

    def chunked(x):
        """[B, T, H, X] → [B, H, chunks, chunk, X], zeros after the last token."""
        x = jnp.pad(x, ((0, 0), (0, padding), (0, 0), (0, 0)))
        x = x.reshape(rows, chunks, chunk_size, heads, x.shape[-1])
        return jnp.moveaxis(x, 3, 1)

    q, k, v, log_decay, beta = (chunked(x) for x in (q, k, v, log_decay, beta[..., None]))
    read, inverse, prefix, suffix = _within_chunks(q, k, beta, log_decay)
    # U = M X with X = beta V − recall_rows S, so O and S' need M only through these products.
    rows_in = jnp.concatenate([beta * k, q], axis=-2) * jnp.exp(jnp.concatenate([prefix] * 2, -2))
    keys_out = jnp.swapaxes(k * jnp.exp(suffix), -1, -2)
    mix = jnp.matmul(jnp.concatenate([read, keys_out], axis=-2), inverse, precision=HIGHEST)
    total_decay = jnp.exp(prefix[..., -1, :])

    def chunk(state, inputs):
        rows_in, beta_v, mix, total_decay = inputs
        seen = jnp.matmul(rows_in, state, precision=HIGHEST)
        written = beta_v - seen[..., :chunk_size, :]
        update = jnp.matmul(mix, written, precision=HIGHEST)
        out = seen[..., chunk_size:, :] + update[..., :chunk_size, :]
        return state * total_decay[..., None] + update[..., chunk_size:, :], out

    per_chunk = tuple(jnp.moveaxis(x, 2, 0) for x in (rows_in, beta * v, mix, total_decay))
    state, out = lax.scan(chunk, initial_state, per_chunk)
    out = jnp.moveaxis(out, 0, 2).reshape(rows, heads, chunks * chunk_size, v.shape[-1])
    return jnp.moveaxis(out, 1, 2)[:, :tokens], state


def _within_chunks(q, k, beta, log_decay):
    """``P``, ``M`` and the log decays since the start and until the end of each chunk."""
    lead, chunk_size, key_dim = k.shape[:-2], k.shape[-2], k.shape[-1]
    prefix, suffix = log_decay[..., None, :], jnp.zeros_like(log_decay)[..., None, :]
    queries = jnp.stack([beta * k, q], axis=-3)
    read = jnp.sum(q * k, axis=-1)[..., None, None]
    inverse = jnp.ones_like(read)
    half = 1
    while half < chunk_size:
        blocks = chunk_size // (2 * half)
        halves = (*lead, blocks, 2, half, key_dim)
        prefix, suffix = prefix.reshape(halves), suffix.reshape(halves)
        later = queries.reshape(*lead, 2, blocks, 2, half, key_dim)[..., 1, :, :]
        later = jnp.moveaxis(later, -4, -3) * jnp.exp(prefix[..., 1, :, :])[..., None, :, :]
        later = later.reshape(*lead, blocks, 2 * half, key_dim)
        earlier = k.reshape(halves)[..., 0, :, :] * jnp.exp(suffix[..., 0, :, :])
        cross = jnp.matmul(later, jnp.swapaxes(earlier, -1, -2), precision=HIGHEST)
        read, inverse = (x.reshape(*lead, blocks, 2, half, half) for x in (read, inverse))
        inverse_cross = -jnp.matmul(
            jnp.matmul(inverse[..., 1, :, :], cross[..., :half, :], precision=HIGHEST),
            inverse[..., 0, :, :],
            precision=HIGHEST,
        )
        read = _merge(read, cross[..., half:, :])
        inverse = _merge(inverse, inverse_cross)
        first_total, second_total = prefix[..., 0, -1:, :], prefix[..., 1, -1:, :]
        prefix = jnp.concatenate([prefix[..., 0, :, :], prefix[..., 1, :, :] + first_total], -2)
        suffix = jnp.concatenate([suffix[..., 0, :, :] + second_total, suffix[..., 1, :, :]], -2)
        half *= 2
    square = (*lead, chunk_size, chunk_size)
    prefix, suffix = prefix.reshape(k.shape), suffix.reshape(k.shape)
    return read.reshape(square), inverse.reshape(square), prefix, suffix


def _merge(diagonal, cross):
    """[.., 2, n, n] diagonal blocks and the lower-left [.., n, n] → [.., 2n, 2n]."""
    upper = jnp.concatenate([diagonal[..., 0, :, :], jnp.zeros_like(cross)], axis=-1)
    lower = jnp.concatenate([cross, diagonal[..., 1, :, :]], axis=-1)
    return jnp.concatenate([upper, lower], axis=-2)
