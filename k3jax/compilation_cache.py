"""Keeps compiled programs between processes, so that a repeated one starts at once."""

import os
from pathlib import Path

SWITCH = "K3JAX_COMPILATION_CACHE"
"""Environment variable; 0 leaves JAX's own settings alone."""

_MIN_SECONDS = 0.2


def enable_compilation_cache() -> Path | None:
    """Turn JAX's persistent cache on, and return its folder; None if there is none to use.

    The folder is `k3jax` in the user's cache folder (`XDG_CACHE_HOME`, or `~/.cache`).
    `JAX_COMPILATION_CACHE_DIR` and the other variables of JAX win. The entries of other machines,
    flags and versions do not match, so a shared folder is safe; nothing ever deletes old ones.
    """
    chosen = os.environ.get("JAX_COMPILATION_CACHE_DIR")
    if chosen:
        return Path(chosen)
    if os.environ.get(SWITCH) == "0":
        return None
    try:
        base = Path(os.environ.get("XDG_CACHE_HOME", ""))
        folder = (base if base.is_absolute() else Path.home() / ".cache") / "k3jax"
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # no home, or one that cannot be written
        return None
    if not os.access(folder, os.W_OK):
        return None
    import jax

    jax.config.update("jax_compilation_cache_dir", str(folder))
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", _MIN_SECONDS)
    return folder
