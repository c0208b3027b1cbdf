"""The model that ships with the package, and how a command line names it."""

from pathlib import Path

BUNDLED = "k3-nano"


def bundled_model() -> Path:
    """The folder of k3-nano: a released-format model with its tokenizer.

    Raises FileNotFoundError when this copy of the package lacks it.
    """
    folder = Path(__file__).parent / "models" / BUNDLED
    if not (folder / "config.json").is_file() or not any(folder.glob("*.safetensors")):
        raise FileNotFoundError(
            f"the bundled model {BUNDLED} is not in {folder.parent}; "
            "train it with `python scripts/train_nano.py`, or name another weights folder"
        )
    return folder


def weights_folder(name: str | Path) -> Path:
    """The folder that a WEIGHTS argument names: a path, or `k3-nano` for the bundled model.

    A folder of that very name is `./k3-nano`. Existence is not checked otherwise. Raises
    FileNotFoundError as `bundled_model`.
    """
    return bundled_model() if str(name) == BUNDLED else Path(name).expanduser()
