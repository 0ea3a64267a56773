#!/bin/sh
# Prints the path of a Python that can hold the virtual environment: 3.12 or newer, with venv and ensurepip.
# 3.12 is asked for first, because Megatron-Core publishes its wheels for it: under a newer one pip compiles it.
# Each candidate is run, not only looked up: pyenv leaves a shim on PATH for versions that are not selected, and some
# distributions leave out ensurepip.

usable='import sys, venv, ensurepip
sys.exit(sys.version_info < (3, 12))'

pyenv_versions="${PYENV_ROOT:-${HOME:-/nonexistent}/.pyenv}/versions"

for candidate in \
    python3.12 "$pyenv_versions"/3.12*/bin/python3.12 \
    python3.13 "$pyenv_versions"/3.13*/bin/python3.13 \
    python3.14 "$pyenv_versions"/3.14*/bin/python3.14 \
    python3 python; do
    # An unmatched pattern of pyenv's stays as it is, and is no command.
    path=$(command -v "$candidate" 2>/dev/null) || continue
    if "$path" -I -c "$usable" >/dev/null 2>&1; then
        printf '%s\n' "$path"
        exit 0
    fi
done

echo "No Python 3.12 or newer with its venv module was found: install one, for example with" \
    "'apt install python3.12-venv', 'brew install python@3.12' or 'pyenv install 3.12', and call make again." >&2
exit 1
