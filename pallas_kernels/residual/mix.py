"""From one sublayer's output to the next one's input: the checked entry point."""

from collections.abc import Sequence

from jaxtyping import Array, Float

from pallas_kernels.implementation import Implementation, chosen
from pallas_kernels.residual import mix_gpu
from pallas_kernels.residual.mix_xla import mixture, rms_norm


def residual_mix(
    bank: Sequence[Float[Array, "*batch hidden"]],
    x: Float[Array, "*batch hidden"],
    y: Float[Array, "*batch hidden"] | None,
    mix: tuple[Float[Array, "hidden"], Float[Array, "hidden"]] | None,
    weight: Float[Array, "hidden"],
    eps: float,
    *,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "*batch hidden"], Float[Array, "*batch hidden"]]:
    """The residual sum `x + y` (y None: x), and the RMSNorm of its mixture with the bank.

    `reference.residual_mix_reference` states the equations; `mix` is its `(norm, proj)`, None for a
    model without Attention Residuals, and `weight` the norm's. Sum and mixture are rounded to the
    dtype of x, in which both results come; statistics and scores are float32. Rows do not meet: a
    padding row may hold anything. `implementation` None asks the plan in use for "residual_mix".
    """
    for name, array in (("y", y), *((f"bank[{i}]", v) for i, v in enumerate(bank))):
        if array is not None and (array.shape, array.dtype) != (x.shape, x.dtype):
            raise ValueError(
                f"{name} is {array.dtype}{list(array.shape)}; x is {x.dtype}{list(x.shape)}"
            )
    for name, array in (("weight", weight), *zip(("norm", "proj"), mix or (), strict=False)):
        if array.shape != x.shape[-1:]:
            raise ValueError(f"{name} has shape {array.shape}; x is {x.shape[-1]} wide")
    runs = chosen("residual_mix") if implementation is None else implementation
    if runs is Implementation.XLA:
        total = x if y is None else x + y
        mixed = total if mix is None else mixture([*bank, total], *mix, eps)
        return total, rms_norm(mixed, weight, eps)
    rows = tuple(v.reshape(-1, x.shape[-1]) for v in ((*bank, x) if mix else (x,)))
    total, normed = mix_gpu.residual_mix(
        rows,
        None if y is None else y.reshape(rows[0].shape),
        mix if bank else None,
        weight,
        eps=eps,
        interpret=runs.interpret,
    )
    return total.reshape(x.shape), normed.reshape(x.shape)
