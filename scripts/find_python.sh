#!/bin/sh
# Prints the path of a Python that k3jax supports (3.12 or 3.13), or says what to install.
#
# PYTHON=... overrides the search. Otherwise the commands on PATH are tried, then pyenv's versions.
# Each candidate is executed: a pyenv shim exists for versions that are not selected, and fails.
# 3.12 comes first, so that something only 3.13 accepts fails here and not at a user's.

# jaxlib has no wheels for the free-threaded build (3.13t).
supported() {
    "$1" -c 'if True:
        import ensurepip, sys, sysconfig, venv
        free_threaded = sysconfig.get_config_var("Py_GIL_DISABLED")
        sys.exit(bool(free_threaded) or not (3, 12) <= sys.version_info < (3, 14))' \
        </dev/null >/dev/null 2>&1
}

if [ -n "${PYTHON:-}" ]; then
    if supported "$PYTHON"; then
        command -v "$PYTHON"
        exit 0
    fi
    echo "k3jax: PYTHON=$PYTHON does not run as Python 3.12 or 3.13 with venv and ensurepip" >&2
    exit 1
fi

pyenv_root=${PYENV_ROOT:-$(pyenv root 2>/dev/null || echo "$HOME/.pyenv")}
for candidate in python3.12 python3.13 python3 python \
    "$pyenv_root"/versions/3.12*/bin/python "$pyenv_root"/versions/3.13*/bin/python; do
    if supported "$candidate"; then
        command -v "$candidate"
        exit 0
    fi
done

echo "k3jax: no Python 3.12 or 3.13 was found, on PATH or in pyenv. Install one, for example with
  pyenv install 3.12
  apt install python3.12-venv     (Debian, Ubuntu; 3.13 does as well)
  brew install python@3.12        (macOS)
  uv python install 3.12
or name one that you have: make PYTHON=/path/to/python3.12" >&2
exit 1
