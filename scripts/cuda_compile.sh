#!/usr/bin/env bash
# Compiles kernels and steps for CUDA (scripts/check_cuda_compile.py), without GPU, driver or CUDA.
# JAX's CUDA plugin, as the extra "cuda-compile" names it, is kept beside .venv, not in it: there
# JAX would look for a GPU in every process. Plugin and result are kept in the user's cache folder,
# the plugin by its version and the result by the sources that it follows from.
set -euo pipefail
cd "$(dirname "$0")/.."

python=.venv/bin/python
read_extra='import tomllib
project = tomllib.load(open("pyproject.toml", "rb"))["project"]
print(*project["optional-dependencies"]["cuda-compile"])'
packages=$("$python" -c "$read_extra")
cache=${XDG_CACHE_HOME:-$HOME/.cache}/k3jax
plugin=$cache/cuda-plugin-$(printf '%s' "$packages" | cksum | tr -d ' ')

if [ ! -d "$plugin" ]; then
    echo "Installing $packages (142 MB) into $plugin"
    mkdir -p "$cache"
    new=$(mktemp -d "$cache/new-XXXXXX")
    trap 'rm -rf "$new"' EXIT
    # shellcheck disable=SC2086  # several requirements
    if ! "$python" -m pip install --quiet --no-deps --target "$new/plugin" $packages; then
        echo "cannot install $packages: kernels and steps were not compiled for CUDA" >&2
        exit 1
    fi
    mv -T "$new/plugin" "$plugin" 2>/dev/null || [ -d "$plugin" ]
fi

# The steps compile every kernel.
PYTHONPATH="$PWD:$plugin" "$python" scripts/check_cuda_compile.py \
    --only step --rows 16 --cache "$cache/cuda-compile" "$@"
