"""Remembers what came of a run for as long as the sources that it depends on stay as they are."""

import hashlib
import importlib.metadata
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = ("pallas_kernels", "k3jax/model", "k3jax/state", "k3jax/engine", "scripts/gpu")
FILES = ("k3jax/config.py", "k3jax/quant.py", "scripts/check_cuda_compile.py")


class SourceCache:
    """Text under a key of sources, arguments and JAX's version, in a folder."""

    def __init__(
        self, folder: str | Path, arguments: Sequence[str] | None, root: Path = ROOT
    ) -> None:
        paths = [path for source in SOURCES for path in sorted((root / source).rglob("*.py"))]
        digest = hashlib.sha256()
        for path in [*paths, *(root / name for name in FILES)]:
            digest.update(f"{path.relative_to(root)}\0".encode())
            digest.update(path.read_bytes())
        digest.update("\0".join([importlib.metadata.version("jax"), *(arguments or ())]).encode())
        self.path = Path(folder) / f"{digest.hexdigest()[:32]}.txt"

    def read(self) -> str | None:
        """What was written under this key, or None."""
        return self.path.read_text(encoding="utf-8") if self.path.is_file() else None

    def write(self, text: str) -> None:
        """Keep it, in place of what was kept for other sources."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        for other in self.path.parent.glob("*.txt"):
            other.unlink()
        self.path.write_text(text, encoding="utf-8")
