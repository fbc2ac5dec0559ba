#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Makes (or reuses) the Python environment of the qa scripts and prints the path of its interpreter,
# alone, on standard output. Everything else goes to standard error.
#
#   python="$(bash build_tools/setup_env.sh test)"      the package with its extra [test]
#   python="$(bash build_tools/setup_env.sh demo)"      the package with its extra [demo]
#   python="$(bash build_tools/setup_env.sh lint)"      black and pylint only, no torch
#
# Which interpreter:
#   - a Python that can already import torch >= 2.11 keeps its torch: the environment is laid over it,
#     or, where it is itself a virtual environment, used as it is;
#   - otherwise a fresh environment with torch==2.13.0, or the newest torch where there is an NVIDIA GPU.
# Variables:
#   TE_PYTHON      the Python to start from (python3)
#   TE_TORCH_SPEC  what to ask pip for instead, options included, for example
#                  TE_TORCH_SPEC="torch==2.13.0 --index-url <PyTorch's CPU wheel index>", which on a
#                  machine without a GPU saves the download of a CUDA build
#   TE_ENV_DIR     where environments are kept (.venv in the repository, which git ignores)
set -euo pipefail

group="${1:?usage: setup_env.sh test|demo|lint}"
repo="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
base="${TE_PYTHON:-python3}"
env_root="${TE_ENV_DIR:-$repo/.venv}"

say() { echo "setup_env: $*" >&2; }
pip() { "$python" -m pip --disable-pip-version-check -qq "$@" >&2; }
can_import() { "$1" -c "import importlib; [importlib.import_module(m) for m in '$2'.split()]" 2>/dev/null; }
has_torch() {
    "$1" -c "
import re, sys, torch
sys.exit(tuple(map(int, re.findall(r'\d+', torch.__version__)[:2])) < (2, 11))" 2>/dev/null
}

"$base" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
    { say "$base is missing or older than Python 3.10; set TE_PYTHON to a newer one."; exit 1; }

# make_env NAME [venv options]: sets $python
make_env() {
    local dir="$env_root/$1"
    shift
    python="$dir/bin/python"
    if ! "$python" -c 'import pip' 2>/dev/null; then
        say "making $dir"
        "$base" -m venv --clear "$@" "$dir" >&2 ||
            { say "$base -m venv failed (on Debian: apt-get install python3-venv)."; exit 1; }
    fi
}

if [ "$group" = lint ]; then
    make_env lint
    specs="$("$base" - "$repo/setup.py" <<'PY'
import ast, sys
tree = ast.parse(open(sys.argv[1], encoding="utf-8").read())
extras = next(n.value for n in tree.body if isinstance(n, ast.Assign) and n.targets[0].id == "EXTRAS")
print(" ".join(ast.literal_eval(extras)["lint"]))
PY
)"
    # shellcheck disable=SC2086  # several specifications
    pip install $specs
    echo "$python"
    exit 0
fi

if has_torch "$base"; then
    if "$base" -c 'import sys; sys.exit(sys.prefix == sys.base_prefix)'; then
        python="$(command -v "$base")"  # a virtual environment; one made from it would not see its torch
    else
        make_env run --system-site-packages
        has_torch "$python" || python="$(command -v "$base")"
    fi
    say "using the torch of $base"
else
    make_env run
    if ! has_torch "$python"; then
        if [ -n "${TE_TORCH_SPEC:-}" ]; then
            spec="$TE_TORCH_SPEC"
        elif command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q GPU; then
            spec="torch>=2.11"
        else
            spec="torch==2.13.0"
        fi
        say "installing $spec"
        # shellcheck disable=SC2086  # a specification may carry options
        pip install $spec
    fi
fi

# From here on pip must leave torch as it is, whatever a dependency would like.
constraint="$(mktemp)"
trap 'rm -f "$constraint"' EXIT
"$python" -c "from importlib.metadata import version; print('torch==' + version('torch'))" >"$constraint"

# The interpreter of Triton runs the kernels' tests on a machine without a GPU; torch's CPU build brings no Triton.
if [ "$group" = test ] && [ "$(uname -s)" = Linux ] && ! can_import "$python" triton; then
    say "installing triton==3.6.0 for the kernel tests"
    pip install "triton==3.6.0" || say "Triton could not be installed; the kernel tests will be skipped."
fi

can_import "$python" "setuptools wheel" || pip install "setuptools>=65" wheel || true
say "installing the package with its extra [$group]"
if ! pip install --no-build-isolation --constraint "$constraint" --editable "$repo[$group]"; then
    # Without a network the extras may be out of reach: the tests need pytest, everything else is optional.
    case "$group" in test) needed=pytest ;; *) needed=torch ;; esac
    can_import "$python" "$needed" || { say "pip failed, and $needed is not there without it."; exit 1; }
    pip install --no-build-isolation --no-deps --editable "$repo" ||
        say "pip cannot install here; the package is used from $repo."
fi
echo "$python"
