"""The generated code is that of the protocol beside it."""

import sys
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).parents[2]
GENERATED = ("k3jax_v1_pb2.py", "k3jax_v1_pb2.pyi", "k3jax_v1_pb2_grpc.py")


def test_committed_code_is_what_the_compiler_writes(tmp_path: Path):
    outputs = [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")]
    code = protoc.main(
        [sys.argv[0], f"-I{ROOT}", *outputs, str(ROOT / "serving/proto/k3jax_v1.proto")]
    )

    assert code == 0
    for name in GENERATED:
        written = (tmp_path / "serving/proto" / name).read_text()
        assert (ROOT / "serving/proto" / name).read_text() == written, name
