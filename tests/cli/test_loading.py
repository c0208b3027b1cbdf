"""Loading for subcommands: dtypes, and the cache of compiled programs."""

import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from k3jax.cli.compile_clock import CompileClock
from k3jax.cli.loading import load_params, open_text_model
from k3jax.compilation_cache import enable_compilation_cache
from k3jax.quant import QuantArray


def test_weights_are_packed_float32_unless_asked_otherwise(text_folder: Path):
    model = open_text_model(str(text_folder))
    plain = load_params(model)
    assert plain.embed.dtype == jnp.float32
    assert isinstance(plain.layers[1].ffn.down, QuantArray)
    other = load_params(model, dtype="bfloat16", dequantize=True)
    assert other.embed.dtype == jnp.bfloat16
    assert not isinstance(other.layers[1].ffn.down, QuantArray)


def chosen_folder(home: Path, **environment: str) -> str:
    """What a fresh process with this environment uses, as JAX's setting says."""
    code = (
        "from k3jax.compilation_cache import enable_compilation_cache as enable\n"
        "folder = enable()\n"
        "import jax\n"
        "assert str(folder) == str(jax.config.jax_compilation_cache_dir), folder\n"
        "print(folder)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={"HOME": str(home), "PATH": "", **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return result.stdout.strip()


def test_compiled_programs_are_kept_in_the_users_cache_folder(tmp_path: Path):
    assert chosen_folder(tmp_path) == str(tmp_path / ".cache" / "k3jax")
    xdg = tmp_path / "xdg"
    assert chosen_folder(tmp_path, XDG_CACHE_HOME=str(xdg)) == str(xdg / "k3jax")
    assert xdg.is_dir()


def test_jaxs_own_variable_wins(tmp_path: Path):
    own = str(tmp_path / "own")
    assert chosen_folder(tmp_path, JAX_COMPILATION_CACHE_DIR=own) == own
    assert not (tmp_path / ".cache").exists()


def test_cache_can_be_off(tmp_path: Path):
    assert chosen_folder(tmp_path, K3JAX_COMPILATION_CACHE="0") == "None"
    assert not (tmp_path / ".cache").exists()


def test_cache_that_cannot_be_written_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("K3JAX_COMPILATION_CACHE")
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    before = jax.config.jax_compilation_cache_dir
    assert enable_compilation_cache() is None
    assert jax.config.jax_compilation_cache_dir == before


def test_clock_counts_compiling_once_and_only_then():
    with CompileClock() as clock:
        start = clock.running()
        jax.jit(lambda x: jnp.sin(x) * 3.25)(jnp.ones(7)).block_until_ready()
        compiled = clock.seconds
        assert compiled > 0
        jnp.ones(7).block_until_ready()
        assert clock.running() - start >= 0
    jax.jit(lambda x: jnp.cos(x) * 1.75)(jnp.ones(7)).block_until_ready()
    assert clock.seconds == compiled or clock.seconds < compiled + 0.05


def test_nested_compile_events_count_once():
    clock = CompileClock()
    event = "/jax/core/compile/backend_compile_duration"
    clock._listen(event, 0.25)
    clock._listen(event, 10.0)
    clock._listen("/jax/other", 99.0)
    assert 10.0 <= clock.seconds < 10.01
