"""The Makefile sets `.venv` up when it must, and only then. pip and venv are played by a script."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# Logs what it is asked to do. `-m venv` installs itself; `-m pip` does what $PIP says.
FAKE_PYTHON = f"""#!/bin/sh
case "$2" in
venv) echo venv >> log; mkdir -p .venv/bin; cp "$0" .venv/bin/python ;;
pip) echo pip >> log; ${{PIP:-true}} ;;
pytest) echo pytest >> log ;;
*) exec "{sys.executable}" "$@" ;;
esac
"""


class Clone:
    """A folder with what `make` reads, and the fake interpreter outside it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "clone"
        (self.folder / "scripts").mkdir(parents=True)
        for name in ("Makefile", "pyproject.toml", "constraints.txt", "scripts/find_python.sh"):
            shutil.copy(ROOT / name, self.folder / name)
        self.python = folder / "python"
        self.python.write_text(FAKE_PYTHON)
        self.python.chmod(0o755)

    def make_test(self, pip: str = "true") -> list[str]:
        """Run `make test`; return the steps that it took."""
        environment = os.environ | {"PYTHON": str(self.python), "PIP": pip}
        environment.pop("MAKEFLAGS", None)
        log = self.folder / "log"
        log.unlink(missing_ok=True)
        subprocess.run(["make", "test"], cwd=self.folder, env=environment, capture_output=True)
        return log.read_text().split()


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    return Clone(tmp_path)


def test_first_run_sets_up_and_second_only_tests(clone: Clone):
    assert clone.make_test() == ["venv", "pip", "pytest"]
    assert clone.make_test() == ["pytest"]


def test_interrupted_set_up_starts_again_from_nothing(clone: Clone):
    assert clone.make_test(pip="false") == ["venv", "pip"]
    assert clone.make_test() == ["venv", "pip", "pytest"]


@pytest.mark.parametrize("name", ["pyproject.toml", "constraints.txt"])
def test_changed_dependencies_update_until_it_succeeds(clone: Clone, name: str):
    clone.make_test()
    later = (clone.folder / ".venv/.ready").stat().st_mtime + 1
    os.utime(clone.folder / name, (later, later))

    assert clone.make_test(pip="false") == ["pip"]
    assert clone.make_test() == ["pip", "pytest"]


def test_moved_folder_gets_a_new_venv(clone: Clone):
    clone.make_test()
    clone.folder = clone.folder.rename(clone.folder.with_name("moved"))

    assert clone.make_test() == ["venv", "pip", "pytest"]


def test_venv_of_a_removed_interpreter_is_replaced(clone: Clone):
    clone.make_test()
    (clone.folder / ".venv/bin/python").unlink()

    assert clone.make_test() == ["venv", "pip", "pytest"]
