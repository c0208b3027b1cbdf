"""`import k3jax` offers the main names without loading what is behind them."""

import subprocess
import sys

import pytest

import k3jax


def test_import_loads_nothing_slow():
    code = "import sys, k3jax; dir(k3jax); print(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    slow = {"jax", "numpy", "flax", "tiktoken", "PIL", "k3jax.engine", "k3jax.chat"}
    assert "k3jax" in result.stdout.split()
    assert slow.isdisjoint(result.stdout.split())


@pytest.mark.parametrize("name", k3jax.__all__)
def test_every_name_is_what_its_module_says(name: str):
    value = getattr(k3jax, name)
    assert name in dir(k3jax)
    if name != "__version__":
        assert value.__name__ == name
        assert value.__module__.startswith("k3jax.")


def test_generate_is_the_function_and_not_a_module():
    import k3jax.cli.generate
    import k3jax.engine.generate

    assert k3jax.generate is k3jax.engine.generate.generate


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'k3jax' has no attribute 'generation'"):
        _ = k3jax.generation
