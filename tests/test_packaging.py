"""The wheel holds what a user needs, and the constraints pin all that a set-up installs."""

import re
import shutil
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PACKAGES = ("k3jax", "pallas_kernels", "serving")
MODEL = "k3jax/models/k3-nano"
MODEL_FILES = ("model.safetensors", "tiktoken.model", "config.json", "images/sample.png")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sources, with one small file of each kind that a bundled model has."""
    root = tmp_path_factory.mktemp("source")
    for name in (*PACKAGES, "tests/cli"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("*.pyc", "models"))
    for name in ("pyproject.toml", "README.md", "LICENSE", ".gitignore"):
        shutil.copy(ROOT / name, root)
    for name in MODEL_FILES:
        path = root / MODEL / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"probe")
    return root


@pytest.fixture(scope="module")
def wheel(source: Path) -> zipfile.ZipFile:
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel"]
    subprocess.run(command, cwd=source, check=True, capture_output=True)
    (path,) = (source / "dist").glob("*.whl")
    return zipfile.ZipFile(path)


def test_wheel_ships_every_file_of_the_packages_and_nothing_else(
    source: Path, wheel: zipfile.ZipFile
):
    expected = {
        str(path.relative_to(source))
        for package in PACKAGES
        for path in (source / package).rglob("*")
        if path.is_file()
    }

    assert {f"{MODEL}/{name}" for name in MODEL_FILES} < expected
    assert {name for name in wheel.namelist() if ".dist-info/" not in name} == expected


def test_wheel_carries_the_licence_and_the_command(wheel: zipfile.ZipFile):
    texts = {Path(name).name: wheel.read(name).decode() for name in wheel.namelist()}

    assert texts["LICENSE"] == (ROOT / "LICENSE").read_text()
    assert "k3jax = k3jax.cli:main" in texts["entry_points.txt"]


def test_installed_command_runs():
    command = Path(sys.executable).with_name("k3jax")

    result = subprocess.run([command, "--help"], capture_output=True, text=True)

    assert result.returncode == 0
    assert result.stdout.startswith("usage: k3jax ")


def test_constraints_pin_every_requirement_of_a_requirement():
    pinned = set(_constraints())

    assert _closure("k3jax", extras={"dev", "train"}) - {"k3jax"} == pinned


def test_constraints_are_names_and_exact_versions_only():
    lines = (ROOT / "constraints.txt").read_text().splitlines()

    odd = [line for line in lines if not re.fullmatch(r"#.*|[\w.-]+==[\w.]+", line)]
    assert odd == []


def _constraints() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line.split("==") for line in lines if not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in pins}


def _closure(distribution: str, *, extras: set[str]) -> set[str]:
    """Canonical names of `distribution` and all that it requires on this platform."""
    found: set[str] = set()
    waiting = [(distribution, frozenset(extras))]
    visited = set()
    while waiting:
        name, wanted = entry = waiting.pop()
        if entry in visited:
            continue
        visited.add(entry)
        found.add(canonicalize_name(name))
        for text in metadata.requires(name) or []:
            requirement = Requirement(text)
            marker = requirement.marker
            if marker is None or any(marker.evaluate({"extra": e}) for e in ("", *wanted)):
                waiting.append((requirement.name, frozenset(requirement.extras)))
    return found
