"""scripts/cuda_compile.sh keeps the plugin between runs, and fails when it cannot be installed."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pallas_kernels.implementation import kernel_supports

ROOT = Path(__file__).parents[1]

# Logs what it is asked to do; `-m pip` makes the folder after --target, then does what $PIP says.
FAKE_PYTHON = f"""#!/bin/sh
case "$1" in
-c) exec "{sys.executable}" "$@" ;;
-m) echo "$2" >> log
    while [ "$1" != --target ]; do shift; done
    mkdir -p "$2"; ${{PIP:-true}} ;;
*) echo "$1" >> log; echo "$PYTHONPATH" >> path ;;
esac
"""


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    folder = tmp_path / "clone"
    (folder / "scripts").mkdir(parents=True)
    for name in ("pyproject.toml", "scripts/cuda_compile.sh"):
        shutil.copy(ROOT / name, folder / name)
    python = folder / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(FAKE_PYTHON)
    python.chmod(0o755)
    return folder


def run(clone: Path, pip: str = "true") -> tuple[subprocess.CompletedProcess[str], list[str]]:
    environment = os.environ | {"XDG_CACHE_HOME": str(clone / "cache"), "PIP": pip}
    (clone / "log").unlink(missing_ok=True)
    done = subprocess.run(
        ["scripts/cuda_compile.sh"], cwd=clone, env=environment, capture_output=True, text=True
    )
    return done, (clone / "log").read_text().split()


def test_the_plugin_is_installed_once(clone: Path):
    done, log = run(clone)
    assert done.returncode == 0, done.stderr
    assert log == ["pip", "scripts/check_cuda_compile.py"]
    assert run(clone)[1] == ["scripts/check_cuda_compile.py"]
    plugin = (clone / "path").read_text().splitlines()[0].split(":")[1]
    assert Path(plugin).is_dir() and Path(plugin).is_relative_to(clone / "cache")


def test_a_plugin_that_cannot_be_installed_is_said_and_fails(clone: Path):
    done, log = run(clone, pip="false")
    assert done.returncode == 1 and log == ["pip"]
    assert "cannot install jax-cuda13-plugin" in done.stderr
    assert run(clone)[1] == ["pip", "scripts/check_cuda_compile.py"]


def test_a_target_without_kernels_is_refused_kernel_by_kernel():
    arguments = ["--target", "b200", "--rows", "1"]
    done = subprocess.run(
        [sys.executable, "scripts/check_cuda_compile.py", *arguments],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    lines = done.stdout.splitlines()
    assert all("not compiled" in line and "NVIDIA B200 is 10.0" in line for line in lines)
    named = {line.split()[0] for line in lines}
    assert named == {*kernel_supports(), "decode", "verify", "prefill"}
