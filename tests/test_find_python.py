"""scripts/find_python.sh chooses a supported interpreter by executing what it finds."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "find_python.sh"

BROKEN_SHIM = "#!/bin/sh\necho 'pyenv: python3.12: command not found' >&2\nexit 127\n"

Run = Callable[..., subprocess.CompletedProcess[str]]


def interpreter_claiming(version: tuple[int, int, int]) -> str:
    """A script that runs this Python's `-c CODE` with another `sys.version_info`."""
    claim = f"import sys; sys.version_info = {version}; exec(sys.argv[1])"
    return f'#!/bin/sh\nexec "{sys.executable}" -c "{claim}" "$2"\n'


def write(path: Path, script: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(script)
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def find_python(tmp_path: Path) -> Run:
    """Runs the script with only `tmp_path/bin` on PATH and `tmp_path/pyenv` as pyenv's root."""

    def run(**environment: str) -> subprocess.CompletedProcess[str]:
        isolated = {"PATH": str(tmp_path / "bin"), "PYENV_ROOT": str(tmp_path / "pyenv")}
        return subprocess.run(
            ["/bin/sh", str(SCRIPT)], env=isolated | environment, capture_output=True, text=True
        )

    return run


def test_pyenv_version_is_found_behind_an_old_python_and_a_broken_shim(
    tmp_path: Path, find_python: Run
):
    write(tmp_path / "bin/python3", interpreter_claiming((3, 11, 7)))
    write(tmp_path / "bin/python3.12", BROKEN_SHIM)
    write(tmp_path / "bin/python3.13", BROKEN_SHIM)
    write(tmp_path / "pyenv/versions/3.11.7/bin/python", interpreter_claiming((3, 11, 7)))
    chosen = write(tmp_path / "pyenv/versions/3.13.0/bin/python", interpreter_claiming((3, 13, 0)))

    assert find_python().stdout == f"{chosen}\n"


@pytest.mark.parametrize("version", [(3, 12, 0), (3, 13, 7)])
def test_supported_python3_on_path_is_enough(
    tmp_path: Path, find_python: Run, version: tuple[int, int, int]
):
    chosen = write(tmp_path / "bin/python3", interpreter_claiming(version))

    assert find_python().stdout == f"{chosen}\n"


@pytest.mark.parametrize("version", [(3, 11, 99), (3, 14, 0)])
def test_without_a_supported_version_it_says_what_to_install(
    tmp_path: Path, find_python: Run, version: tuple[int, int, int]
):
    write(tmp_path / "bin/python3", interpreter_claiming(version))

    result = find_python()

    assert (result.returncode, result.stdout) == (1, "")
    assert "pyenv install 3.12" in result.stderr


def test_override_wins_over_the_search(tmp_path: Path, find_python: Run):
    write(tmp_path / "bin/python3.12", interpreter_claiming((3, 12, 1)))
    chosen = write(tmp_path / "mine", interpreter_claiming((3, 13, 0)))

    assert find_python(PYTHON=chosen).stdout == f"{chosen}\n"


def test_unusable_override_is_an_error_that_names_it(tmp_path: Path, find_python: Run):
    write(tmp_path / "bin/python3.12", interpreter_claiming((3, 12, 1)))
    old = write(tmp_path / "old", interpreter_claiming((3, 11, 7)))

    result = find_python(PYTHON=old)

    assert (result.returncode, result.stdout) == (1, "")
    assert f"PYTHON={old}" in result.stderr
