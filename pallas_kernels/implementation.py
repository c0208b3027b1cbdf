"""Which implementation runs each op, on which device, and why."""

import dataclasses
import enum
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu

from pallas_kernels.measured import Measured, measured_steps, nearest, worthwhile
from pallas_kernels.shapes import ModelShape


class Implementation(enum.Enum):
    """How an op runs: plain XLA, a Mosaic GPU kernel, or that kernel interpreted on the CPU."""

    XLA = "xla"
    GPU = "gpu"
    INTERPRET = "interpret"

    @property
    def interpret(self) -> plgpu.InterpretGPUParams | None:
        """What a Mosaic kernel takes: None compiles it, parameters interpret it, races noted."""
        if self is Implementation.INTERPRET:
            return plgpu.InterpretGPUParams(detect_races=True)
        return None


class Support(NamedTuple):
    """Whether a kernel takes a model's shapes; the reason says which rule holds or breaks."""

    ok: bool
    reason: str


class Device(NamedTuple):
    """What decides whether a kernel can run somewhere."""

    platform: str
    """JAX's name: "gpu", "cpu"."""
    kind: str
    """The maker's name, such as "NVIDIA H200"; tuned data is filed under it."""
    compute_capability: str | None = None
    """Such as "9.0"; None off GPUs."""

    @classmethod
    def current(cls) -> "Device":
        """The first device of the default back end."""
        device = jax.devices()[0]
        platform = "gpu" if device.platform in ("gpu", "cuda") else device.platform
        capability = getattr(device, "compute_capability", None)
        return cls(platform, device.device_kind, capability)


class Choice(NamedTuple):
    """One row of a plan."""

    op: str
    implementation: Implementation
    reason: str


@dataclasses.dataclass(frozen=True)
class KernelPlan:
    """One implementation per op; hashable, so that it can be a static argument."""

    device: Device
    choices: tuple[Choice, ...]

    def __getitem__(self, op: str) -> Implementation:
        for choice in self.choices:
            if choice.op == op:
                return choice.implementation
        raise KeyError(f"no op {op!r} in the plan; it has {', '.join(c.op for c in self.choices)}")

    def as_dict(self) -> dict[str, dict[str, str]]:
        """By op: `runs_as` and `because`, as JSON holds them."""
        return {op: {"runs_as": runs.value, "because": reason} for op, runs, reason in self.choices}

    def __str__(self) -> str:
        rows = [("op", "runs as", "because")]
        rows += [(c.op, c.implementation.value, c.reason) for c in self.choices]
        first, second = (max(len(row[column]) for row in rows) for column in (0, 1))
        lines = [f"{op:<{first}}  {name:<{second}}  {why}" for op, name, why in rows]
        return "\n".join([f"kernels on {self.device.kind}", *lines])


def plan_kernels(
    config: Any,
    device: Device | None = None,
    overrides: Mapping[str, str | Implementation] | None = None,
    *,
    activation_dtype: str = "bfloat16",
    page_size: int = 64,
    batch: int = 1,
    context: int = 4096,
    measured: tuple[Measured, ...] | None = None,
) -> KernelPlan:
    """Choose an implementation for every op of a model; `config` is its K3Config or ModelShape.

    An op named in `overrides` runs as it says, or ValueError tells why it cannot. Any other op
    runs as XLA unless whole steps of this model were measured to be faster with the kernel
    (`measured.worthwhile`), on this kind of device and at the workload nearest to `batch` rows and
    `context` tokens: `measured` None reads what `scripts/tune_kernels.py` left in
    `pallas_kernels/tuned`. `device` None is the one that JAX runs on.
    """
    shape = (
        config
        if isinstance(config, ModelShape)
        else ModelShape.of(config, activation_dtype, page_size)
    )
    device = Device.current() if device is None else device
    measured = measured_steps(device.kind) if measured is None else measured
    wanted = {op: Implementation(value) for op, value in (overrides or {}).items()}
    check_ops(wanted)
    choices = []
    for op, supports in kernel_supports().items():
        support = supports(shape)
        if op in wanted:
            choices.append(_explicit(op, wanted[op], support, device))
        else:
            steps = nearest(measured, op, shape, batch, context)
            choices.append(_automatic(op, support, device, steps))
    return KernelPlan(device, tuple(choices))


def kernel_supports() -> dict[str, Callable[[ModelShape], Support]]:
    """Every op that has a kernel, with the rule for the shapes that it takes."""
    # Imported here because the ops ask this module what to run as.
    from pallas_kernels.kda import mixer_step_gpu, prefill_gpu, verify_gpu
    from pallas_kernels.mla import expanded_gpu, paged_decode_gpu
    from pallas_kernels.moe import mxfp4_gpu
    from pallas_kernels.residual import mix_gpu

    return {
        "kda_decode": mixer_step_gpu.supports,
        "kda_prefill": prefill_gpu.supports,
        "kda_verify": verify_gpu.supports,
        "kda_replay": verify_gpu.supports,
        "mla_decode": paged_decode_gpu.supports,
        "mla_prefill": expanded_gpu.supports,
        "experts": mxfp4_gpu.supports,
        "residual_mix": mix_gpu.supports,
    }


def check_ops(overrides: Mapping[str, Any]) -> None:
    """Raise ValueError naming an op that has no kernel."""
    kernels = kernel_supports()
    for op in overrides:
        if op not in kernels:
            raise ValueError(f"no op {op!r} to choose; the ops are {', '.join(kernels)}")


_active = jax.make_user_context(default_value=None)


@contextmanager
def use_plan(plan: KernelPlan | None) -> Iterator[None]:
    """Run what is traced inside under `plan`; None means XLA throughout.

    The plan is part of the key of every jit cache: one function called under two plans is
    compiled for each.
    """
    with _active(plan):
        yield


def chosen(op: str) -> Implementation:
    """What the plan in use says about `op`."""
    plan = _active.value
    return Implementation.XLA if plan is None else plan[op]


def device_platform() -> str:
    """JAX's name of what the traced program will run on: "cpu", "gpu".

    That of the plan in use, so that a machine without a GPU can trace for one; without a plan, of
    JAX's default back end.
    """
    plan = _active.value
    return jax.default_backend() if plan is None else plan.device.platform


def _explicit(op: str, wanted: Implementation, support: Support, device: Device) -> Choice:
    if wanted is Implementation.XLA:
        return Choice(op, wanted, "asked for")
    if not support.ok:
        raise ValueError(f"{op} cannot run as {wanted.value}: {support.reason}")
    if wanted is Implementation.GPU and not runs_kernels(device):
        raise ValueError(f"{op} cannot run as gpu: {device_rule(device)}")
    return Choice(op, wanted, f"asked for; {support.reason}")


def _automatic(op: str, support: Support, device: Device, steps: tuple[Measured, ...]) -> Choice:
    if not runs_kernels(device):
        return Choice(op, Implementation.XLA, device_rule(device))
    if not support.ok:
        return Choice(op, Implementation.XLA, support.reason)
    if not steps:
        return Choice(op, Implementation.XLA, "the kernel fits, but no step was timed with it")
    runs = Implementation.GPU if worthwhile(steps) else Implementation.XLA
    reasons = [
        f"a {step.step} step of batch {step.batch} and context {step.context} takes "
        f"{step.gpu_us:.0f} µs with the kernel, {step.xla_us:.0f} µs without"
        for step in steps
    ]
    return Choice(op, runs, "; ".join(reasons))


def runs_kernels(device: Device) -> bool:
    """Whether this is a GPU that the kernels are written for."""
    return device.platform == "gpu" and device.compute_capability == "9.0"


def device_rule(device: Device) -> str:
    """What kernels need, and what this device is instead."""
    found = device.compute_capability or f"a {device.platform}"
    return f"kernels need compute capability 9.0 (H100, H200); {device.kind} is {found}"
