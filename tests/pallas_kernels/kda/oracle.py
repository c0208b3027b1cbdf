"""Random inputs for the KDA operators, and their answers in float64 numpy."""

import numpy as np

GATES = ("mixed", "bound", "slow", "unbounded", "frozen")


def kda_inputs(rng, rows, tokens, heads, key_dim, value_dim, gate="mixed", keys="random"):
    """float32 ``q, k, v, log_decay, beta, state`` as ``kda_chunk`` takes them.

    ``gate``: K3's whole range, all at its bound −5, nearly no decay, Kimi-Linear's unbounded range
    (down to −150 beside −1e-6), or −60 everywhere. ``keys``: "repeated" makes a head's keys nearly
    one direction with beta near 1, which is when (I + A)⁻¹ is worst conditioned.
    """
    shape = (rows, tokens, heads, key_dim)
    q, k = unit(rng.standard_normal(shape)) * key_dim**-0.5, unit(rng.standard_normal(shape))
    beta_logits = 2.0 * rng.standard_normal(shape[:3])
    if keys == "repeated":
        k = unit(0.1 * k + unit(rng.standard_normal((rows, 1, heads, key_dim))))
        beta_logits += 5.0
    log_decay = {
        "mixed": lambda: -5.0 * sigmoid(4.0 * rng.standard_normal(shape)),
        "bound": lambda: np.full(shape, -5.0),
        "slow": lambda: np.full(shape, -1e-6),
        "unbounded": lambda: -np.exp(rng.uniform(np.log(1e-6), np.log(150.0), shape)),
        "frozen": lambda: np.full(shape, -60.0),
    }[gate]()
    v = rng.standard_normal((*shape[:3], value_dim))
    state = rng.standard_normal((rows, heads, key_dim, value_dim))
    return tuple(x.astype(np.float32) for x in (q, k, v, log_decay, sigmoid(beta_logits), state))


def recurrence(q, k, v, log_decay, beta, state):
    """The delta rule one token at a time in float64: outputs and last state."""
    q, k, v, log_decay, beta, state = (
        np.asarray(x, np.float64) for x in (q, k, v, log_decay, beta, state)
    )
    out = np.zeros(v.shape)
    for t in range(q.shape[1]):
        state = state * np.exp(log_decay[:, t])[..., None]
        error = v[:, t] - np.einsum("bhkv,bhk->bhv", state, k[:, t])
        state = state + np.einsum("bhk,bhv->bhkv", k[:, t], beta[:, t, :, None] * error)
        out[:, t] = np.einsum("bhkv,bhk->bhv", state, q[:, t])
    return out, state


def relative_error(got, want):
    """Largest absolute difference over the largest value wanted."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape
    return np.abs(got - want).max() / np.abs(want).max()


def unit(x):
    return x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True))


def sigmoid(x):
    return 1.0 / (1.0 + np.exp(-x))
