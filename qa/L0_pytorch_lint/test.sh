#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# black, pylint and the source checks, in an environment of their own (build_tools/setup_env.sh).
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

python="$(bash build_tools/setup_env.sh lint)" || exit 1
export PYTHONPATH="$PWD"
status=0

step() {
    echo "--- $1"
    shift
    "$@" || status=1
}

step "black" "$python" -m black --check --quiet --diff transformer_engine tests build_tools qa docs setup.py
step "pylint: package, tools, examples" "$python" -m pylint --score=n --recursive=y --max-parents=10 \
    transformer_engine build_tools setup.py docs/examples qa
# Tests may be long, may have no docstrings, use fixtures by redefining their names and import helpers
# from beside them.
step "pylint: tests" "$python" -m pylint --score=n --recursive=y --max-parents=10 \
    --disable=missing-docstring,redefined-outer-name,duplicate-code,too-many-lines,invalid-name,wrong-import-order tests
step "licence and package rules" "$python" build_tools/check_sources.py

[ "$status" -eq 0 ] && echo "lint: ok" || echo "lint: FAILED"
exit "$status"
