#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Trains the byte-level language model of docs/examples/byte_lm.py with every recipe and compares them.
# Sets up its own environment (build_tools/setup_env.sh). Arguments go to the script: run.sh --steps 50 --text FILE
set -euo pipefail
repo="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"

python="$(bash "$repo/build_tools/setup_env.sh" demo)"
export PYTHONPATH="$repo${PYTHONPATH:+:$PYTHONPATH}"
exec "$python" "$repo/docs/examples/byte_lm.py" "$@"
