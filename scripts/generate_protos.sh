#!/usr/bin/env bash
# Writes the Python code of serving/proto/*.proto beside them, with the grpcio-tools of .venv.
set -euo pipefail
cd "$(dirname "$0")/.."

OUT=${1:-.}
.venv/bin/python -m grpc_tools.protoc -I. \
    --python_out="$OUT" --pyi_out="$OUT" --grpc_python_out="$OUT" serving/proto/*.proto
