"""Puts a written model in its place only when it is complete."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

CONFIG_FILE = "config.json"
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
NATIVE_MANIFEST = "k3jax.json"
NATIVE_WEIGHTS = "orbax"


@contextlib.contextmanager
def new_model_folder(folder: Path, *, overwrite: bool) -> Iterator[Path]:
    """A temporary folder whose entries move to `folder` at the end of the block.

    When the block raises, nothing is left behind. Other files in `folder`, such as a tokenizer's,
    stay. A model that is already there makes this raise ValueError, before the block runs, unless
    `overwrite`: then its files go once the new ones are complete.
    """
    check_free(folder, overwrite=overwrite)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as name:
        temporary = Path(name) / "model"
        temporary.mkdir()
        yield temporary
        if not folder.exists():
            os.rename(temporary, folder)
            return
        for entry in model_entries(folder):
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        # The config last: a folder without one is not taken for a model.
        for entry in sorted(temporary.iterdir(), key=lambda entry: entry.name == CONFIG_FILE):
            os.rename(entry, folder / entry.name)


def check_folder(folder: Path) -> None:
    """Raise FileNotFoundError or ValueError when `folder` is none."""
    if not folder.exists():
        raise FileNotFoundError(f"no such folder: {folder}")
    if not folder.is_dir():
        raise ValueError(f"{folder} is a file; expected a model folder")


def check_free(folder: Path, *, overwrite: bool = False) -> None:
    """Raise ValueError when a model cannot be written to `folder`."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file; expected a folder to write a model to")
    found = model_entries(folder)
    if found and not overwrite:
        raise ValueError(f"{folder} already holds a model ({found[0].name}); it is not overwritten")


def model_entries(folder: Path) -> list[Path]:
    """What in `folder` belongs to a model in either format; empty when there is no folder."""
    names = [CONFIG_FILE, NATIVE_MANIFEST, NATIVE_WEIGHTS, INDEX_FILE]
    found = [folder / name for name in names if (folder / name).exists()]
    return found + sorted(folder.glob("*.safetensors"))


def is_native(folder: Path) -> bool:
    """Whether `folder` holds a model in our format rather than a released one.

    Raises FileNotFoundError when it holds neither, and ValueError when it holds both.
    """
    check_folder(folder)
    native = (folder / NATIVE_MANIFEST).is_file()
    released = (folder / INDEX_FILE).is_file() or any(folder.glob("*.safetensors"))
    if native and released:
        raise ValueError(f"{folder} holds both {NATIVE_MANIFEST} and safetensors files; keep one")
    if not native and not released:
        raise FileNotFoundError(
            f"no model in {folder}: expected {SINGLE_FILE}, {INDEX_FILE} or {NATIVE_MANIFEST}"
        )
    return native
