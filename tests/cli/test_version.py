"""`k3jax version` reports what is installed, also where JAX cannot start."""

import json
import os
import platform
import subprocess
import sys

import jax
import pytest

import k3jax
from k3jax.cli import main


def test_json_names_versions_and_devices(capsys: pytest.CaptureFixture[str]):
    assert main(["version", "--json"]) == 0

    report = json.loads(capsys.readouterr().out)
    assert report["k3jax"] == k3jax.__version__
    assert report["python"] == platform.python_version()
    assert report["jax"] == report["jaxlib"] == jax.__version__ == "0.11.2"
    assert len(report["devices"]) == jax.device_count()


def test_text_has_one_line_for_each_entry(capsys: pytest.CaptureFixture[str]):
    main(["version"])

    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert names == ["k3jax", "python", "jax", "jaxlib", "flax", "devices"]


@pytest.mark.parametrize("platform_name", ["nonsense", "rocm"])
def test_platform_that_cannot_start_is_reported_not_raised(platform_name: str):
    code = "import sys; from k3jax.cli import main; sys.exit(main(['version', '--json']))"

    result = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"JAX_PLATFORMS": platform_name},
        stdout=subprocess.PIPE,
    )

    report = json.loads(result.stdout)
    assert (result.returncode, report["devices"]) == (0, [])
    assert report["problem"].endswith(f"(JAX_PLATFORMS is {platform_name})")
