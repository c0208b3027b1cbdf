"""The equations of Kimi Delta Attention, one token at a time, in the plainest JAX.

Every faster path is tested against this file. All maths is float32 whatever the inputs' dtype.

Axes: ``B`` rows, ``T`` tokens, ``H`` heads, ``K`` key channels, ``V`` value channels, ``C``
convolution channels, ``W`` convolution taps.

Source: the released ``modeling_kimi_linear.py`` and the K3 technical report, equations 3 to 7.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

HIGHEST = lax.Precision.HIGHEST


def kda_recurrent(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H V"],
    log_decay: Float[Array, "B T H K"],
    beta: Float[Array, "B T H"],
    initial_state: Float[Array, "B H K V"] | None = None,
) -> tuple[Float[Array, "B T H V"], Float[Array, "B H K V"]]:
    """Run the gated delta rule token by token; returns the outputs and the last state, float32.

    For each head, with the state ``S`` key-first::

        S ← diag(exp(log_decay_t)) S          the decay comes first, along the key axis
        d  = v_t − Sᵀ k_t                     the error against the decayed state
        S ← S + k_t (beta_t d)ᵀ
        o_t = Sᵀ q_t                          reads the state after the update

    ``q`` and ``k`` are already normalised (``l2_norm``) and ``q`` is scaled by ``K ** -0.5``.
    A token with ``k = 0``, ``log_decay = 0``, ``beta = 0`` and a finite ``v`` keeps ``S`` as it is.
    """
    rows, _, heads, key_dim = k.shape
    if initial_state is None:
        initial_state = jnp.zeros((rows, heads, key_dim, v.shape[-1]), jnp.float32)

    def token(state: Array, inputs: tuple[Array, ...]) -> tuple[Array, Array]:
        q_t, k_t, v_t, g_t, beta_t = inputs
        state = state * jnp.exp(g_t)[..., None]
        error = v_t - jnp.einsum("bhkv,bhk->bhv", state, k_t, precision=HIGHEST)
        state = state + k_t[..., None] * (beta_t[..., None] * error)[..., None, :]
        return state, jnp.einsum("bhkv,bhk->bhv", state, q_t, precision=HIGHEST)

    tokens_first = [jnp.moveaxis(x.astype(jnp.float32), 1, 0) for x in (q, k, v, log_decay, beta)]
    state, out = lax.scan(token, initial_state.astype(jnp.float32), tuple(tokens_first))
    return jnp.moveaxis(out, 0, 1), state


def kda_prefill(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H V"],
    log_decay: Float[Array, "B T H K"],
    beta: Float[Array, "B T H"],
    lengths: Int[Array, "B"],
    state_pool: Float[Array, "slots H K V"],
    read_slots: Int[Array, "B"],
    write_slots: Int[Array, "B"],
    export_counts: Int[Array, "B"] | None = None,
    export_slots: Int[Array, "B"] | None = None,
) -> tuple[Float[Array, "B T H V"], Float[Array, "slots H K V"]]:
    """A span per row, from and to a pool of states: `prefill.kda_prefill` says what slots mean.

    Rows are right-padded; what lies from ``lengths[b]`` on is ignored and its outputs are zero.
    """
    states = _read(state_pool, read_slots)
    spans = [(lengths, write_slots, lengths >= 0)]
    if export_counts is not None and export_slots is not None:
        wanted = (export_counts >= 1) & (export_counts <= lengths)
        spans.insert(0, (export_counts, export_slots, wanted))
    out, pool = jnp.zeros(v.shape, jnp.float32), state_pool
    for counts, slots, wanted in spans:
        keep = jnp.arange(k.shape[1]) < counts[:, None]
        q_in, k_in, v_in, decay_in = (
            jnp.where(keep[..., None, None], x, 0) for x in (q, k, v, log_decay)
        )
        strength = jnp.where(keep[..., None], beta, 0)
        out, after = kda_recurrent(q_in, k_in, v_in, decay_in, strength, states)
        pool = _write(pool, jnp.where(wanted, slots, -1), after)
    return out, pool


def kda_verify(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H V"],
    log_decay: Float[Array, "B T H K"],
    beta: Float[Array, "B T H"],
    lengths: Int[Array, "B"],
    state_pool: Float[Array, "slots H K V"],
    read_slots: Int[Array, "B"],
) -> tuple[Float[Array, "B T H V"], Float[Array, "B T H V"]]:
    """Outputs of a few tokens per row and what each would write, ``u_t = beta_t d``; no state.

    With ``d`` as in ``kda_recurrent``. Zeros from ``lengths[b]`` on.
    """
    state, outs, writes = _read(state_pool, read_slots), [], []
    for t in range(k.shape[1]):
        real = (t < lengths)[:, None, None]
        q_t, k_t, v_t, g_t = (
            jnp.where(real, x[:, t].astype(jnp.float32), 0) for x in (q, k, v, log_decay)
        )
        beta_t = jnp.where(real, beta[:, t, :, None].astype(jnp.float32), 0)
        state = state * jnp.exp(g_t)[..., None]
        error = v_t - jnp.einsum("bhkv,bhk->bhv", state, k_t, precision=HIGHEST)
        writes.append(beta_t * error)
        state = state + k_t[..., None] * writes[-1][..., None, :]
        outs.append(jnp.einsum("bhkv,bhk->bhv", state, q_t, precision=HIGHEST))
    return jnp.stack(outs, axis=1), jnp.stack(writes, axis=1)


def kda_replay(
    writes: Float[Array, "B T H V"],
    k: Float[Array, "B T H K"],
    log_decay: Float[Array, "B T H K"],
    counts: Int[Array, "B"],
    state_pool: Float[Array, "slots H K V"],
    read_slots: Int[Array, "B"],
    write_slots: Int[Array, "B"],
) -> Float[Array, "slots H K V"]:
    """The pool after each row's first ``counts[b]`` tokens of what ``kda_verify`` recorded.

    ``S ← diag(exp(log_decay_t)) S + k_t u_tᵀ`` for each; none leave the state that was read.
    """
    state = _read(state_pool, read_slots)
    for t in range(k.shape[1]):
        after = state * jnp.exp(log_decay[:, t])[..., None]
        after = after + k[:, t, :, :, None] * writes[:, t, :, None, :]
        state = jnp.where((t < counts)[:, None, None, None], after, state)
    return _write(state_pool, write_slots, state)


def _read(pool: Float[Array, "slots H K V"], slots: Int[Array, "B"]) -> Float[Array, "B H K V"]:
    return jnp.where((slots < 0)[:, None, None, None], 0, jnp.take(pool, slots, 0, mode="clip"))


def _write(
    pool: Float[Array, "slots H K V"], slots: Int[Array, "B"], states: Float[Array, "B H K V"]
) -> Float[Array, "slots H K V"]:
    return pool.at[jnp.where(slots < 0, pool.shape[0], slots)].set(states, mode="drop")


def short_conv(
    x: Float[Array, "B T C"],
    window: Float[Array, "B W-1 C"],
    weight: Float[Array, "C W"],
    lengths: Int[Array, "B"],
) -> tuple[Float[Array, "B T C"], Float[Array, "B W-1 C"]]:
    """Depthwise causal convolution and SiLU, as ``lax.conv_general_dilated`` states it.

    ``y[t] = SiLU(Σ_j weight[:, j] · x[t − (W−1) + j])``: the last tap meets the current token, and
    ``window`` holds the raw inputs before the first one, oldest first. The new window holds the raw
    inputs before token ``lengths[b]``. Outputs from ``lengths[b]`` on are zero.
    """
    channels, taps = weight.shape
    history = jnp.concatenate([window.astype(jnp.float32), x.astype(jnp.float32)], axis=1)
    y = lax.conv_general_dilated(
        history,
        weight.astype(jnp.float32).T[:, None, :],
        window_strides=(1,),
        padding="VALID",
        dimension_numbers=("NWC", "WIO", "NWC"),
        feature_group_count=channels,
        precision=HIGHEST,
    )
    inside = jnp.arange(x.shape[1])[None, :, None] < lengths[:, None, None]
    raw = jnp.concatenate([window, x.astype(window.dtype)], axis=1)
    columns = lengths[:, None] + jnp.arange(taps - 1)[None, :]
    new_window = jnp.take_along_axis(raw, columns[:, :, None], axis=1)
    return jnp.where(inside, jax.nn.silu(y), 0.0).astype(x.dtype), new_window


def l2_norm(x: Float[Array, "*batch K"], eps: float = 1e-6) -> Float[Array, "*batch K"]:
    """``x / sqrt(Σ x² + eps)`` over the last axis, float32; zero stays zero."""
    x = x.astype(jnp.float32)
    return x * lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + eps)


def log_decay_gate(
    x: Float[Array, "*batch H K"],
    a_log: Float[Array, "H"],
    dt_bias: Float[Array, "H K"],
    lower_bound: float | None,
) -> Float[Array, "*batch H K"]:
    """Log decay per key channel, float32 and never positive.

    ``x`` is the output of the low-rank gate projection. With ``z = x + dt_bias`` and the per-head
    scalar ``a = exp(a_log)``: ``lower_bound · σ(a z)`` for K3 (``lower_bound`` −5), and
    ``−a · softplus(z)`` for Kimi-Linear (``lower_bound`` None), which has no bound below.
    """
    z = x.astype(jnp.float32) + dt_bias.astype(jnp.float32)
    a = jnp.exp(a_log.astype(jnp.float32))[:, None]
    if lower_bound is None:
        return -a * jax.nn.softplus(z)
    return lower_bound * jax.nn.sigmoid(a * z)


def gated_rms_norm(
    x: Float[Array, "*batch V"],
    gate: Float[Array, "*batch V"],
    weight: Float[Array, "V"],
    eps: float,
) -> Float[Array, "*batch V"]:
    """``x / sqrt(mean x² + eps) · weight · σ(gate)`` over the last axis, float32 throughout."""
    x = x.astype(jnp.float32)
    normed = x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
    return normed * weight.astype(jnp.float32) * jax.nn.sigmoid(gate.astype(jnp.float32))


def kda_mixer_step(
    projected: Float[Array, "B C"],
    decay: Float[Array, "B H K"],
    beta: Float[Array, "B H"],
    gate: Float[Array, "B H K"],
    taps: Float[Array, "C W"],
    a_log: Float[Array, "H"],
    decay_bias: Float[Array, "H K"],
    out_norm: Float[Array, "K"],
    state: Float[Array, "B H K K"],
    window: Float[Array, "B W-1 C"],
    *,
    lower_bound: float | None,
    eps: float,
) -> tuple[Float[Array, "B H K"], Float[Array, "B H K K"], Float[Array, "B W-1 C"]]:
    """One token of a mixer between its projections: the functions above in their order.

    `projected` holds all heads' queries, then keys, then values; `decay`, `beta` and `gate` are
    logits. Returns the gated output, the new state and the new window.
    """
    rows, heads, key = decay.shape
    lengths = jnp.ones((rows,), jnp.int32)
    mixed, window = short_conv(projected[:, None], window, taps, lengths)
    q, k, v = jnp.split(mixed.reshape(rows, 1, 3 * heads, key), 3, axis=2)
    out, state = kda_recurrent(
        l2_norm(q) * key**-0.5,
        l2_norm(k),
        v,
        log_decay_gate(decay, a_log, decay_bias, lower_bound)[:, None],
        jax.nn.sigmoid(beta.astype(jnp.float32))[:, None],
        state,
    )
    return gated_rms_norm(out[:, 0], gate, out_norm, eps), state, window
