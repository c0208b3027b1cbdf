"""The gated delta rule over chunks of tokens, as matrix products, for prefill and training.

``reference.kda_recurrent`` states what is computed. For a chunk of ``N`` tokens that enters with
state ``S``, let ``G_i`` be the sum of the log decays of tokens 1..i, per key channel, and::

    A_ij = beta_i Σ_c k_ic k_jc exp(G_ic − G_jc)   j < i    what token i recalls of j's write
    P_ij =        Σ_c q_ic k_jc exp(G_ic − G_jc)   j ≤ i    what token i reads of j's write
    M    = (I + A)⁻¹
    X    = diag(beta) (V − (exp(G) ⊙ K) S)
    O    = (exp(G) ⊙ Q) S + P M X
    S'   = diag(exp(G_N)) S + (exp(G_N − G) ⊙ K)ᵀ M X

Only the products with ``S`` and ``X`` are sequential, two for each chunk; the rest is computed for
many chunks at once. No exponent is the difference of two long sums, so nothing cancels. There are
two ways to ``A`` and ``P``, see ``_centred`` and ``_nested``.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

HIGHEST = lax.Precision.HIGHEST

# exp(±40) squared stays in float32's range; rounding the exponent costs exp(40) 2e-6 of its value.
LARGEST_EXPONENT = 40.0

# Neumann's product for the inverse squares A; past 8 tokens its terms grow into the thousands for
# nearly equal keys and cancel at the cost of four digits. Larger inverses are merged from halves.
NEUMANN_TOKENS = 8


def kda_chunk(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H V"],
    log_decay: Float[Array, "B T H K"],
    beta: Float[Array, "B T H"],
    initial_state: Float[Array, "B H K V"],
    *,
    chunk_size: int,
    log_decay_bound: float | None,
    block_elements: int,
) -> tuple[Float[Array, "B T H V"], Float[Array, "B H K V"]]:
    """Chunked ``reference.kda_recurrent``, all float32; ``chunk_size`` is a power of two.

    Work is cut, first by rows and then by tokens, into blocks of about ``block_elements`` key
    channels: on CPU the temporaries of a block then stay in cache, and below the size from which
    the allocator returns memory to the system (page faults took half of the time of a large call).
    Backward recomputes a block at a time from its inputs.
    """
    rows, tokens, heads, key_dim = k.shape
    if tokens == 0:
        return jnp.zeros(v.shape, jnp.float32), initial_state
    centred = log_decay_bound is not None and -log_decay_bound * chunk_size <= 2 * LARGEST_EXPONENT
    run = functools.partial(_block, chunk_size=chunk_size, centred=centred)
    per_token = heads * max(key_dim, v.shape[-1])
    block_rows = max(1, block_elements // (tokens * per_token))
    block_rows = next(n for n in range(min(rows, block_rows), 0, -1) if rows % n == 0)
    chunks = -(-tokens // chunk_size)
    block_chunks = max(1, block_elements // (chunk_size * block_rows * per_token))
    if chunks > block_chunks:
        blocks = -(-chunks // block_chunks)
        run = functools.partial(_by_tokens, run, -(-chunks // blocks) * chunk_size)
    inputs = (q, k, v, log_decay, beta, initial_state)
    if block_rows < rows:
        return _by_rows(run, block_rows, inputs)
    return run(*inputs)


Operator = Callable[..., tuple[Array, Array]]


def _by_rows(run: Operator, rows: int, inputs: tuple[Array, ...]) -> tuple[Array, Array]:
    run = jax.checkpoint(run, prevent_cse=False)
    groups = tuple(x.reshape(-1, rows, *x.shape[1:]) for x in inputs)
    out, state = lax.map(lambda group: run(*group), groups)
    return out.reshape(-1, *out.shape[2:]), state.reshape(-1, *state.shape[2:])


def _by_tokens(
    run: Operator, block: int, *inputs: Float[Array, "B ..."]
) -> tuple[Float[Array, "B T H V"], Float[Array, "B H K V"]]:
    *tokenwise, state = inputs
    rows, tokens = tokenwise[0].shape[:2]
    blocks = -(-tokens // block)
    run = jax.checkpoint(run, prevent_cse=False)

    def step(state: Array, piece: tuple[Array, ...]) -> tuple[Array, Array]:
        out, state = run(*piece, state)
        return state, out

    pieces = tuple(
        _leading_chunks(_pad_tokens(x, blocks * block).reshape(rows, blocks, block, *x.shape[2:]))
        for x in tokenwise
    )
    state, out = lax.scan(step, state, pieces)
    out = _leading_chunks(out)
    return out.reshape(rows, blocks * block, *out.shape[3:])[:, :tokens], state


def _block(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H V"],
    log_decay: Float[Array, "B T H K"],
    beta: Float[Array, "B T H"],
    state: Float[Array, "B H K V"],
    *,
    chunk_size: int,
    centred: bool,
) -> tuple[Float[Array, "B T H V"], Float[Array, "B H K V"]]:
    rows, tokens, heads, _ = k.shape
    value_dim = v.shape[-1]
    chunks = -(-tokens // chunk_size)
    q, k, v, log_decay, beta = (
        _pad_tokens(x, chunks * chunk_size) for x in (q, k, v, log_decay, beta[..., None])
    )
    q, k, log_decay, beta = (_by_chunk(x, chunk_size) for x in (q, k, log_decay, beta))
    parts = (_centred if centred else _nested)(q, k, log_decay, chunks)
    token = np.arange(chunk_size)
    recall = jnp.where(token[:, None] > token, beta * parts.scores[:, :chunk_size], 0.0)
    read = jnp.where(token[:, None] >= token, parts.scores[:, chunk_size:], 0.0)
    # P M and (exp(G_N − G) ⊙ K)ᵀ M in one product: what X adds to the outputs and to the state.
    keys_out = (parts.columns * parts.to_next).swapaxes(-1, -2)
    effect = _matmul(jnp.concatenate([read, keys_out], axis=-2), _unit_lower_inverse(recall))

    # Values and outputs stay as they lie, tokens outside heads, and are turned in the scan's
    # passes. Rows are joined to another axis: XLA's CPU compiler copies arrays with an axis of one
    # row.
    v = _leading_chunks(v.reshape(rows, chunks, chunk_size, heads, value_dim))
    v = v.reshape(chunks, rows * chunk_size, heads, value_dim)

    def chunk(state: Array, inputs: tuple[Array, ...]) -> tuple[Array, Array]:
        queries, v, beta, effect, decay = inputs
        v = v.reshape(rows, chunk_size, heads, value_dim).swapaxes(1, 2)
        seen = _matmul(queries, state)
        write = beta * (v.reshape(-1, chunk_size, value_dim) - seen[:, :chunk_size])
        change = _matmul(effect, write)
        out = seen[:, chunk_size:] + change[:, :chunk_size]
        out = out.reshape(rows, heads, chunk_size, value_dim).swapaxes(1, 2)
        state = state * decay[..., None] + change[:, chunk_size:]
        return state, out.reshape(-1, heads, value_dim)

    queries, beta, effect, carry, enter = (
        x.reshape(chunks, rows * heads, *x.shape[1:])
        for x in (parts.queries, beta, effect, parts.carry, parts.enter)
    )
    entering = state.reshape(*enter.shape[1:], value_dim) * enter[0][..., None]
    last, out = lax.scan(chunk, entering, (queries, v, beta, effect, carry))
    out = _leading_chunks(out.reshape(chunks, rows, chunk_size, heads, value_dim))
    out = out.reshape(rows, chunks * chunk_size, heads, value_dim)
    return out[:, :tokens], last.reshape(state.shape)


class _Parts(NamedTuple):
    """What the scan needs of each chunk, the axis ``G`` running over chunk, row and head.

    ``queries`` are the rows of K and then of Q, decayed from the chunk's frame, the place among its
    tokens where its state is looked at; ``columns`` are the rows of K decayed to the frame.
    """

    scores: Float[Array, "G 2C C"]  # A without beta and then P; the upper triangles mean nothing
    queries: Float[Array, "G 2C K"]
    columns: Float[Array, "G C K"]
    to_next: Float[Array, "G 1 K"]  # decay of the columns to the next chunk's frame
    carry: Float[Array, "G K"]  # decay from this chunk's frame to the next one's
    enter: Float[Array, "G K"]  # decay from the start of the chunk to its frame


def _centred(
    q: Float[Array, "G C K"],
    k: Float[Array, "G C K"],
    log_decay: Float[Array, "G C K"],
    chunks: int,
) -> _Parts:
    """``A`` and ``P`` in one product, rows and columns being measured from the chunk's middle.

    Exponents reach half a chunk's total decay in either direction, so the decay must have a bound.
    The state too is looked at in the middle of each chunk, after the last one at its end.
    """
    tokens = k.shape[1]
    middle = tokens // 2
    first = second = jnp.zeros_like(log_decay[:, 0])
    since_middle = [first] * tokens
    for t in range(middle, tokens):
        second = second + log_decay[:, t]
        since_middle[t] = second
    for t in reversed(range(middle)):
        since_middle[t] = -first
        first = first + log_decay[:, t]
    exponent = jnp.stack(since_middle, axis=1)
    decay, growth = jnp.exp(exponent), jnp.exp(-exponent)
    queries = jnp.concatenate([k * decay, q * decay], axis=1)
    columns = k * growth
    next_first = jnp.roll(first.reshape(chunks, -1), -1, axis=0).at[-1].set(0.0)
    carry = jnp.exp(second + next_first.reshape(first.shape))
    scores = _matmul(queries, columns.swapaxes(-1, -2))
    return _Parts(scores, queries, columns, carry[:, None], carry, jnp.exp(first))


def _nested(
    q: Float[Array, "G C K"],
    k: Float[Array, "G C K"],
    log_decay: Float[Array, "G C K"],
    chunks: int,
) -> _Parts:
    """``A`` and ``P`` block by block, for log decays without a bound.

    Two neighbouring blocks of tokens meet in one product: the later one's rows are measured from
    the border forward and the earlier one's columns backward, so no exponent is positive. Blocks
    double from one token to half a chunk, and with them the sums of log decays since a block's
    start and until its end. The state is looked at before each chunk.
    """
    del chunks
    groups, tokens, key_dim = k.shape
    since, until = log_decay, jnp.zeros_like(log_decay)
    # Diagonal blocks of A and P side by side; a token does not recall its own write, but reads it.
    own = jnp.sum(q * k, axis=-1).reshape(groups * tokens, 1, 1)
    blocks = jnp.stack([jnp.zeros_like(own), own], axis=1)
    size = 1
    while size < tokens:
        pairs = groups * tokens // (2 * size)
        halves = (pairs, 2, size, key_dim)
        since, until = since.reshape(halves), until.reshape(halves)
        decay = jnp.exp(since[:, 1])
        later = [x.reshape(halves)[:, 1] * decay for x in (k, q)]
        earlier = k.reshape(halves)[:, 0] * jnp.exp(until[:, 0])
        cross = _matmul(jnp.concatenate(later, axis=1), earlier.swapaxes(-1, -2))
        blocks = _merge(
            blocks.reshape(pairs, 2, 2, size, size), cross.reshape(pairs, 2, size, size)
        )
        first_total, second_total = since[:, 0, -1:], since[:, 1, -1:]
        since = jnp.concatenate([since[:, 0], since[:, 1] + first_total], axis=1)
        until = jnp.concatenate([until[:, 0] + second_total, until[:, 1]], axis=1)
        size *= 2
    since, until = since.reshape(k.shape), until.reshape(k.shape)
    decay = jnp.exp(since)
    return _Parts(
        scores=blocks.reshape(groups, 2 * tokens, tokens),
        queries=jnp.concatenate([k * decay, q * decay], axis=1),
        columns=k * jnp.exp(until),
        to_next=jnp.ones((groups, 1, key_dim), jnp.float32),
        carry=decay[:, -1],
        enter=jnp.ones((groups, key_dim), jnp.float32),
    )


def _unit_lower_inverse(strict: Float[Array, "G C C"]) -> Float[Array, "G C C"]:
    """``(I + strict)⁻¹`` for a strictly lower triangular argument."""
    groups, size, _ = strict.shape
    if size <= NEUMANN_TOKENS:
        inverse, power, terms = jnp.eye(size) - strict, strict, 2
        while terms < size:
            power = _matmul(power, power)
            inverse, terms = inverse + _matmul(inverse, power), 2 * terms
        return inverse
    half = size // 2
    diagonal = jnp.stack([strict[:, :half, :half], strict[:, half:, half:]], axis=1)
    inverse = _unit_lower_inverse(diagonal.reshape(2 * groups, half, half))
    inverse = inverse.reshape(groups, 2, half, half)
    cross = -_matmul(_matmul(inverse[:, 1], strict[:, half:, :half]), inverse[:, 0])
    return _merge(inverse[:, :, None], cross[:, None])[:, 0]


def _merge(
    diagonal: Float[Array, "G 2 M n n"], cross: Float[Array, "G M n n"]
) -> Float[Array, "G M 2n 2n"]:
    """Two diagonal blocks and the one below the first → one block."""
    upper = jnp.concatenate([diagonal[:, 0], jnp.zeros_like(cross)], axis=-1)
    return jnp.concatenate([upper, jnp.concatenate([cross, diagonal[:, 1]], axis=-1)], axis=-2)


def _by_chunk(x: Float[Array, "B T H X"], chunk_size: int) -> Float[Array, "G C X"]:
    """Whole chunks, heads outside tokens; groups run over chunk, row and head."""
    rows, tokens, heads, width = x.shape
    x = _leading_chunks(x.reshape(rows, tokens // chunk_size, chunk_size, heads, width))
    return x.swapaxes(2, 3).reshape(-1, chunk_size, width)


def _leading_chunks(x: Float[Array, "a b ..."]) -> Float[Array, "b a ..."]:
    """Swap rows and chunks. With one row a reshape says so: XLA's CPU compiler copies the swap."""
    if 1 in x.shape[:2]:
        return x.reshape(x.shape[1], x.shape[0], *x.shape[2:])
    return x.swapaxes(0, 1)


def _pad_tokens(x: Float[Array, "B T ..."], tokens: int) -> Float[Array, "B T2 ..."]:
    """Append zeros: they decay nothing and write nothing."""
    return jnp.pad(x, ((0, 0), (0, tokens - x.shape[1])) + ((0, 0),) * (x.ndim - 2))


def _matmul(a: Array, b: Array) -> Array:
    return jnp.matmul(a, b, precision=HIGHEST)
