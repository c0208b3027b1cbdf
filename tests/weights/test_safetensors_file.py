"""A header is believed only when it fits its file; what we write, the safetensors library reads."""

import json
import struct
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from k3jax.weights.safetensors_file import read_header, read_into, write_file


def raw(path: Path, header: Any, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def f32(shape: Any, start: Any, end: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}


def test_written_file_is_the_librarys(tmp_path: Path):
    rng = np.random.default_rng(1)
    arrays = {
        "a": rng.standard_normal((3, 5)).astype(np.float32),
        "b": rng.standard_normal((1, 7)).astype(jnp.bfloat16),
        "c": rng.standard_normal(2).astype(np.float16),
        "d": rng.integers(0, 256, (2, 1, 3), dtype=np.uint8),
    }
    save_file(arrays, tmp_path / "theirs", metadata={"format": "pt"})
    described = [(name, array.dtype, array.shape) for name, array in arrays.items()]
    write_file(tmp_path / "ours", described, iter(arrays.values()))

    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
    assert [(t.name, t.shape) for t in read_header(tmp_path / "ours")] == [
        (name, array.shape) for name, array in arrays.items()
    ]


def test_tensors_may_arrive_in_pieces_but_must_be_complete(tmp_path: Path):
    described = [("a", np.dtype(np.float32), (5,))]
    whole = np.arange(5, dtype=np.float32)
    write_file(tmp_path / "ok", described, iter([whole[:2], whole[2:]]))

    np.testing.assert_array_equal(load_file(tmp_path / "ok")["a"], whole)
    with pytest.raises(ValueError, match="wrote 16 bytes of tensors, the header says 20"):
        write_file(tmp_path / "short", described, iter([whole[:4]]))


@pytest.mark.parametrize(
    ("header", "data", "expected"),
    [
        (b"{", b"", "is not valid JSON"),
        (b"\xff\xfe", b"", "is not valid JSON"),
        (b"[" * 100_000, b"", "is not valid JSON"),
        ([], b"", "must be a JSON object"),
        (b'{"a": 1, "a": 2}', b"", "tensor a is in the header twice"),
        ({"a": 5}, b"", "tensor a lacks"),
        ({"a": {"dtype": "F32"}}, b"", "tensor a lacks"),
        ({"a": f32([-1], 0, 4)}, bytes(4), "tensor a has shape"),
        ({"a": f32([1.0], 0, 4)}, bytes(4), "tensor a has shape"),
        ({"a": f32([True], 0, 4)}, bytes(4), "tensor a has shape"),
        ({"a": f32("1", 0, 4)}, bytes(4), "tensor a has shape"),
        ({"a": f32([1], 4, 0)}, bytes(4), "tensor a has shape"),
        ({"a": f32([1], 0, None)}, bytes(4), "tensor a has shape"),
        ({"a": f32([2], 0, 4)}, bytes(4), "needs 8 bytes, its data_offsets [0, 4] give 4"),
        ({"a": f32([1], 0, 4) | {"dtype": "F31"}}, bytes(4), "unknown dtype 'F31'"),
        ({"a": f32([1], 0, 4), "b": f32([1], 0, 4)}, bytes(4), "tensor b overlaps"),
        ({"a": f32([2], 0, 8), "b": f32([1], 4, 8)}, bytes(8), "tensor b overlaps"),
        ({"a": f32([1], 4, 8)}, bytes(8), "tensor a follows a gap"),
        ({"a": f32([1], 0, 4), "b": f32([1], 8, 12)}, bytes(12), "tensor b follows a gap"),
        ({"a": f32([1], 0, 4), "b": f32([1], 4, 8)}, bytes(7), "truncated: tensor b ends at"),
        ({"a": f32([1], 0, 4)}, bytes(9), "5 bytes follow the last tensor"),
    ],
)
def test_malformed_header_is_named(tmp_path: Path, header: Any, data: bytes, expected: str):
    file = raw(tmp_path / "bad", header, data)

    with pytest.raises(ValueError) as caught:
        read_header(file)
    assert expected in str(caught.value)
    assert str(caught.value).startswith(f"{file}: ")


@pytest.mark.parametrize("data", [b"", b"1234567", bytes(8)[:7] + b"\x7f", b"\xff" * 64])
def test_file_without_room_for_its_header_is_named(tmp_path: Path, data: bytes):
    (tmp_path / "bad").write_bytes(data)

    with pytest.raises(ValueError, match="truncated or no safetensors file"):
        read_header(tmp_path / "bad")


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_no_truncation_goes_unnoticed(tmp_path: Path, data: st.DataObject):
    file = tmp_path / "file"
    save_file({"a": np.arange(7, dtype=np.float32), "b": np.arange(3, dtype=np.uint8)}, file)
    whole = file.read_bytes()
    file.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])

    with pytest.raises(ValueError, match="truncated"):
        read_header(file)


def test_empty_tensors_and_scalars_are_no_gap(tmp_path: Path):
    arrays = {"a": np.zeros((0, 3), np.float32), "b": np.array(2.5, np.float32)}
    save_file(arrays, tmp_path / "file")

    assert {t.name: t.shape for t in read_header(tmp_path / "file")} == {"a": (0, 3), "b": ()}


@pytest.mark.parametrize("chunk_bytes", [4, 12, 28, 400])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("count", [0, 1, 5, 7])
def test_first_elements_are_read_in_chunks(
    tmp_path: Path, chunk_bytes: int, dtype: type, count: int
):
    save_file({"a": np.zeros(3, np.float32), "b": np.arange(7, dtype=np.float32)}, tmp_path / "f")
    tensor = read_header(tmp_path / "f")[1]
    target, steps = np.full(count + 1, 99, dtype), []
    with (tmp_path / "f").open("rb", buffering=0) as stream:
        read_into(stream, tensor, target[:count], steps.append, chunk_bytes=chunk_bytes)

    assert target.tolist() == [*range(count), 99]
    assert sum(steps) == 4 * count
    assert all(0 < step <= chunk_bytes for step in steps)


def test_file_that_shrinks_after_the_check_is_noticed(tmp_path: Path):
    save_file({"a": np.arange(7, dtype=np.float32)}, tmp_path / "file")
    (tensor,) = read_header(tmp_path / "file")
    (tmp_path / "file").write_bytes((tmp_path / "file").read_bytes()[:-1])

    with (
        (tmp_path / "file").open("rb") as stream,
        pytest.raises(ValueError, match="tensor a ended early"),
    ):
        read_into(stream, tensor, np.empty(7, np.float32), print)
