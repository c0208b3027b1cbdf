"""Compiles JAX functions for NVIDIA GPUs on a machine that has neither GPU nor driver.

JAX's CUDA plugin can compile for a described device. XLA and Mosaic GPU then assemble machine code
in this process, and what the assembler says about each kernel goes to the process's output, which
is caught here. Import this module before anything imports JAX: Mosaic reads its settings once.
"""

import ctypes
import dataclasses
import importlib.metadata
import math
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"  # no cuDNN or cuBLAS is needed to compile
os.environ["MOSAIC_GPU_DUMP_PTX"] = "1"
os.environ["MOSAIC_GPU_DUMP_PTXAS"] = "1"

import jax
from jax._src.pallas.mosaic_gpu import lowering
from jax.experimental import topologies

from pallas_kernels.implementation import Device
from scripts.gpu.program_text import KernelReport, Move, large_moves, parse_assembler

PACKAGES = ("jax-cuda13-plugin", "jax-cuda13-pjrt")


class Target(NamedTuple):
    """A GPU to compile for."""

    device: str
    capability: tuple[int, int]
    processors: int
    memory: int
    bandwidth: int
    """Bytes per second."""
    flops: int
    """Dense bfloat16 operations per second."""


TARGETS = {
    "h100": Target("NVIDIA H100", (9, 0), 132, 85 * 10**9, 3_350 * 10**9, 989 * 10**12),
    "h200": Target("NVIDIA H200", (9, 0), 132, 151 * 10**9, 4_800 * 10**9, 989 * 10**12),
    "b200": Target("NVIDIA B200", (10, 0), 148, 191 * 10**9, 8_000 * 10**9, 2_250 * 10**12),
}


@dataclasses.dataclass(frozen=True)
class Report:
    """What became of one function; `problems` is empty when it is as it should be."""

    name: str
    target: str
    seconds: float
    kernels: tuple[KernelReport, ...]
    donated_bytes: int
    aliased_bytes: int
    temporary_bytes: int
    large_moves: tuple[Move, ...]
    """Copies, conversions and transpositions of more than 1 MiB: `program_text.large_moves`."""
    problems: tuple[str, ...]


def missing_plugin() -> str | None:
    """How to install what compiling needs, or None when it is there."""
    version = importlib.metadata.version("jax")
    for package in PACKAGES:
        try:
            found = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found = None
        if found != version:
            wanted = " ".join(f"{name}=={version}" for name in PACKAGES)
            return (
                f"{package} is {found or 'not installed'}; compiling for CUDA needs it at JAX's "
                f"own version (142 MB, no driver and no CUDA): pip install {wanted}"
            )
    return None


def compile_for(
    name: str,
    jitted: Any,
    arguments: tuple[Any, ...],
    target: str,
    *,
    donated: tuple[int, ...] = (),
    expected_kernels: int = 0,
    known_moves: int | None = None,
) -> Report:
    """Compile `jitted.trace(*arguments)`; arguments are trees of `jax.ShapeDtypeStruct`.

    Problems are: it does not compile, fewer Mosaic kernels than expected, spilled registers,
    donated bytes that are not reused, more than `known_moves` moves of more than 1 MiB (None: any
    copy among them).
    """
    mesh = _mesh(target)
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    placed = jax.tree.map(
        lambda spec: jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=sharding), arguments
    )
    donated_bytes = sum(_nbytes(leaf) for i in donated for leaf in jax.tree.leaves(arguments[i]))
    start = time.perf_counter()
    try:
        with (
            _shared_memory() as shared,
            _output() as output,
            jax.sharding.use_abstract_mesh(mesh.abstract_mesh),
        ):
            compiled = jitted.trace(*placed).lower().compile()
    except Exception as error:
        message = f"{type(error).__name__}: {str(error)[:400]}"
        seconds = time.perf_counter() - start
        return Report(name, target, seconds, (), donated_bytes, 0, 0, (), (message,))
    seconds = time.perf_counter() - start
    kernels = tuple(
        dataclasses.replace(kernel, shared_bytes=kernel.shared_bytes + extra)
        for kernel, extra in zip(parse_assembler("".join(output)), shared, strict=False)
    )
    memory, text = compiled.memory_analysis(), compiled.as_text()
    moves = large_moves(text)
    problems = [f"{k.name} spills {k.spilled_bytes} bytes" for k in kernels if k.spilled_bytes]
    if len(kernels) < expected_kernels:
        problems.append(f"{len(kernels)} Mosaic kernels, expected {expected_kernels}")
    if memory.alias_size_in_bytes < donated_bytes:
        problems.append(f"{donated_bytes - memory.alias_size_in_bytes} donated bytes not reused")
    counted = [move for move in moves if known_moves is not None or move.kind == "copy"]
    if len(counted) > (known_moves or 0):
        problems.append(
            f"{len(counted)} moves of more than 1 MiB, known are {known_moves or 0}: "
            + ", ".join(f"{move.kind} {move.array}" for move in counted)
        )
    return Report(
        name,
        target,
        seconds,
        kernels,
        donated_bytes,
        memory.alias_size_in_bytes,
        memory.temp_size_in_bytes,
        tuple(moves),
        tuple(problems),
    )


def target_device(name: str) -> Device:
    """The device as a kernel plan knows it."""
    target = TARGETS[name]
    return Device("gpu", target.device, ".".join(map(str, target.capability)))


def _mesh(name: str) -> Any:
    target = TARGETS[name]
    major, minor = target.capability
    description = f"""
        gpu_device_info {{
          name: "{target.device}" device_vendor: "NVIDIA Corporation"
          cuda_compute_capability {{
            major: {major} minor: {minor} feature_extension: ACCELERATED_FEATURES
          }}
          platform_version: "Compute Capability {major}.{minor}a" device_address_bits: 64
          core_count: {target.processors} fpus_per_core: 128 clock_rate_ghz: 1.8
          device_memory_size: {target.memory} memory_bandwidth: {target.bandwidth}
          l2_cache_size: 52428800
          threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: 2048
          thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
          block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
          registers_per_core_limit: 65536 registers_per_block_limit: 65536
          shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448
          shared_memory_per_core: 233472
          driver_version: "13.0.0" runtime_version: "13.0.0"
          compile_time_toolkit_version: "13.0.0" dnn_version: "9.12.0"
        }}
        platform_name: "CUDA" device_description_str: "{target.device}"
        dnn_version_info {{ major: 9 minor: 12 patch: 0 }}
    """
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=description, topology="1x1x1"
    )
    return topologies.make_mesh(topology, (1,), ("device",))


def _nbytes(leaf: Any) -> int:
    return math.prod(leaf.shape) * leaf.dtype.itemsize


@contextmanager
def _output() -> Iterator[list[str]]:
    """Everything that this process writes inside, C++ included, arrives in the list at the end."""
    sys.stdout.flush()
    sys.stderr.flush()
    written: list[str] = []
    with tempfile.TemporaryFile() as file:
        kept = [os.dup(1), os.dup(2)]
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        try:
            yield written
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            ctypes.CDLL(None).fflush(None)
            for descriptor, copy in zip((1, 2), kept, strict=True):
                os.dup2(copy, descriptor)
                os.close(copy)
            file.seek(0)
            written.append(file.read().decode(errors="replace"))


@contextmanager
def _shared_memory() -> Iterator[list[int]]:
    """Bytes of dynamic shared memory of each Mosaic kernel lowered inside.

    The assembler does not know them, and JAX has no public way to ask: its estimate of a kernel's
    resources is listened to, at the outermost of its recursive calls.
    """
    sizes: list[int] = []
    original, depth = lowering._estimate_resources, 0

    def listening(*args: Any, **kwargs: Any) -> Any:
        nonlocal depth
        depth += 1
        try:
            resources = original(*args, **kwargs)
        finally:
            depth -= 1
        if depth == 0:
            sizes.append(int(resources.smem_scratch_bytes))
        return resources

    lowering._estimate_resources = listening
    try:
        yield sizes
    finally:
        lowering._estimate_resources = original
