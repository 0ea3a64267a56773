#!/bin/sh
# Makes .venv with the package (editable) and its test extra, or returns at once when it is there and up to date.
set -eu

cd "$(dirname "$0")/.."
venv=.venv
stamp=$venv/installed-from

# The place is part of it because an editable install remembers it: a copied checkout must not import the original.
wanted="$(pwd -P) $(cat pyproject.toml megatron_eopt/version.py scripts/constraints.txt | cksum)"

if "$venv/bin/python" -c '' 2>/dev/null; then
    [ "$wanted" = "$(cat "$stamp" 2>/dev/null)" ] && exit 0
else
    python=$(scripts/find-python.sh)
    echo "Making $venv with $python"
    rm -rf "$venv"
    "$python" -I -m venv "$venv"
fi

echo "Installing the package and what it needs into $venv (PyTorch is large: the first time takes minutes)"
rm -f "$stamp"
# pip would compile all of PyTorch, most of which nobody imports
"$venv/bin/python" -m pip install --disable-pip-version-check --no-compile \
    --constraint scripts/constraints.txt --editable '.[test]'
printf '%s\n' "$wanted" >"$stamp"
