#!/usr/bin/env bash
# Makes the virtual environment FOLDER, or brings it up to date, with the project installed in it.
#
#   make_venv.sh FOLDER       uses find_python.sh, which honours PYTHON=...
set -euo pipefail
cd "$(dirname "$0")/.."

folder=$1
if ! "$folder/bin/python" -m pip --version >/dev/null 2>&1; then
    python=$(bash scripts/find_python.sh)
    echo "Making $folder with $python"
    rm -rf "$folder"
    "$python" -m venv "$folder"
fi
tested=$("$folder/bin/python" -c 'import sys; print("py312" if sys.version_info >= (3, 12) else "py311")')
echo "Installing lora-moe-jax and its development tools into $folder"
# Python compiles what is imported; all of it takes longer than everything else here. `compat`: by a
# path. By setuptools' finder a script beside a clone would import the clone's folder, an empty package.
"$folder/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile \
    --config-settings editable_mode=compat \
    --constraint "constraints/$tested.txt" --editable ".[dev]"
