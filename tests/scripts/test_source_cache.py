"""What was compiled is remembered until a source or an argument changes."""

from pathlib import Path

import pytest

from scripts.gpu.source_cache import FILES, SOURCES, SourceCache


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in (*(f"{folder}/a.py" for folder in SOURCES), *FILES):
        path = tmp_path / "root" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x = 1\n")
    return tmp_path / "root"


def test_a_result_is_read_again_until_a_source_changes(root: Path, tmp_path: Path):
    cache = SourceCache(tmp_path, ["--rows", "1"], root)
    assert cache.read() is None
    cache.write("fine")
    assert SourceCache(tmp_path, ["--rows", "1"], root).read() == "fine"
    assert SourceCache(tmp_path, ["--rows", "2"], root).read() is None
    (root / SOURCES[0] / "b.py").write_text("")
    assert SourceCache(tmp_path, ["--rows", "1"], root).read() is None


def test_only_the_newest_result_is_kept(root: Path, tmp_path: Path):
    folder = tmp_path / "kept"
    for text in ("one", "two"):
        SourceCache(folder, [text], root).write(text)
    assert [path.read_text() for path in folder.iterdir()] == ["two"]
