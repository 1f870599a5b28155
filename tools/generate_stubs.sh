#!/usr/bin/env bash
# Generates the Python stubs of every .proto next to it. Usage: tools/generate_stubs.sh [OUT_DIR], by default proto/src.
set -euo pipefail
root="$(cd "$(dirname "$0")/.." && pwd)"
out="$(mkdir -p "${1:-$root/proto/src}" && cd "${1:-$root/proto/src}" && pwd)"
export PATH="$root/.venv/bin:$PATH"
cd "$root/proto/src"
mapfile -t protos < <(find torchrelay -name '*.proto' | sort)
python -m grpc_tools.protoc -I. --python_out="$out" --grpc_python_out="$out" \
    --mypy_out=quiet:"$out" --mypy_grpc_out=quiet:"$out" "${protos[@]}"
# A file without services needs no gRPC stub.
for proto in "${protos[@]}"; do
    grep -q '^service ' "$proto" || rm -f "$out/${proto%.proto}_pb2_grpc.py" "$out/${proto%.proto}_pb2_grpc.pyi"
done
