"""What a GPU script finds on its machine before it starts, and why it cannot start there."""

import importlib.metadata

import jax

from pallas_kernels.implementation import Device, device_rule, runs_kernels

PLUGIN = "jax-cuda13-plugin"


def about_machine() -> dict[str, str | int | None]:
    """Versions of JAX and its CUDA plugin, and the device with its memory in bytes.

    Raises RuntimeError as JAX does where it finds no device.
    """
    device = Device.current()
    return {
        "jax": jax.__version__,
        "jaxlib": version("jaxlib"),
        PLUGIN: version(PLUGIN),
        "device": device.kind,
        "compute_capability": device.compute_capability,
        "memory": memory()[1],
    }


def unfit(device: Device) -> str | None:
    """Why kernels cannot run on this device, and what may help; None where they can."""
    if runs_kernels(device):
        return None
    if device.platform == "gpu":
        return device_rule(device)
    plugin, own = version(PLUGIN), version("jax")
    if plugin is None:
        return f"no GPU: {PLUGIN} is not installed; pip install -c constraints.txt -e '.[cuda13]'"
    if plugin != own:
        return f"no GPU: {PLUGIN} is {plugin}, and jax is {own}; they must be equal"
    return f"no GPU: {PLUGIN} is there, but JAX runs on {device.kind}; does nvidia-smi work?"


def version(package: str) -> str | None:
    """Of an installed package, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def memory() -> tuple[int | None, int | None]:
    """The device's most bytes in use so far, and all it has to give; None where JAX cannot tell."""
    found = jax.devices()[0].memory_stats() or {}
    return found.get("peak_bytes_in_use"), found.get("bytes_limit")
