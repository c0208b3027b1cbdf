"""Every import contract of pyproject.toml catches the import that it is there to forbid."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LINT = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]


@pytest.mark.parametrize(
    ("contract", "module", "imported"),
    [
        ("Imports point down", "pallas_kernels/probe.py", "k3jax.config"),
        ("Imports point down", "k3jax/state/probe.py", "k3jax.model.params"),
        ("Imports point down", "k3jax/quant.py", "k3jax.sharding"),
        ("Imports point down", "serving/probe.py", "k3jax.cli"),
        ("Imports point down", "k3jax/engine/probe.py", "serving"),
        ("Only serving imports grpc", "k3jax/probe.py", "grpc"),
        ("Host policy is plain Python", "k3jax/engine/scheduler.py", "numpy"),
        ("Host policy is plain Python", "k3jax/cache/pool.py", "jax.numpy"),
        ("The engine knows no text", "k3jax/model/probe.py", "k3jax.chat"),
        ("Text needs no model", "k3jax/chat/probe.py", "jax"),
        ("Mixers do not know one another", "k3jax/model/kda.py", "k3jax.model.mla"),
    ],
)
def test_contract_catches(tmp_path: Path, contract: str, module: str, imported: str):
    for package in ("k3jax", "pallas_kernels", "serving"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=_all_but_code)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    _ensure_module(tmp_path, f"{imported.replace('.', '/')}.py")
    path = _ensure_module(tmp_path, module)
    path.write_text(path.read_text() + f"\nimport {imported}\n")

    report = subprocess.run(LINT, cwd=tmp_path, capture_output=True, text=True).stdout

    assert f"{contract} BROKEN" in report


def _ensure_module(root: Path, module: str) -> Path:
    """The file `module` under `root`, written empty if it is one of ours and does not exist."""
    path = root / module
    is_ours = module.startswith(("k3jax/", "pallas_kernels/", "serving/"))
    if is_ours and not path.with_suffix("").is_dir():
        path.parent.mkdir(exist_ok=True)
        (path.parent / "__init__.py").touch()
        path.touch()
    return path


def _all_but_code(folder: str, names: list[str]) -> set[str]:
    return {name for name in names if "." in name and not name.endswith(".py")}
