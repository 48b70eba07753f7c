#!/usr/bin/env bash
# Prints the path of a Python that can make the project's virtual environment.
#
#   find_python.sh             the best of 3.13, 3.12, 3.11; then any newer python3
#   find_python.sh 3.11        that version only
#   PYTHON=... find_python.sh  that interpreter, if it will do
#
# For each version it tries what is on PATH, then what pyenv has. Candidates are run, not only
# found: a pyenv shim is on PATH for every installed version and fails for inactive ones.
set -euo pipefail

rejected=()
check='
import sys
if sys.version_info < (3, 11):
    sys.exit("it is Python %d.%d" % sys.version_info[:2])
try:
    import ensurepip, venv
except ImportError:
    sys.exit("it has no venv module (on Debian and Ubuntu: install python3-venv)")
'

usable() {
    local python=$1 problem
    problem=$("$python" -c "$check" 2>&1) && return 0
    rejected+=("$python: ${problem:-it does not run}")
    return 1
}

fail() {
    {
        echo "$1"
        if ((${#rejected[@]})); then
            echo "Looked at:"
            printf '  %s\n' "${rejected[@]}"
        fi
        echo "Install Python 3.11, 3.12 or 3.13 with its venv module, or name an interpreter:"
        echo "  make PYTHON=/path/to/python ..."
    } >&2
    exit 1
}

if [[ -n ${PYTHON:-} ]]; then
    python=$(type -P "$PYTHON") || fail "PYTHON=$PYTHON is not a program."
    usable "$python" || fail "PYTHON=$PYTHON will not do."
    echo "$python"
    exit
fi

versions=("$@")
((${#versions[@]})) || versions=(3.13 3.12 3.11 3)
for version in "${versions[@]}"; do
    # One path a line; a pyenv pattern that matches nothing stays as it is, and is not executable.
    candidates=$(
        type -aP "python$version" || true
        printf '%s\n' "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"$version".*/bin/python
    )
    while IFS= read -r python; do
        if [[ -x $python ]] && usable "$python"; then
            echo "$python"
            exit
        fi
    done <<<"$candidates"
done
if (($#)); then
    fail "No Python $* with the venv module was found."
fi
fail "No Python 3.11 or newer with the venv module was found."
