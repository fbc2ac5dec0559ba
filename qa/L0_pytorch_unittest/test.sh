#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# All unit tests, on the CPU or on the GPU that is there. Sets up its own environment
# (build_tools/setup_env.sh). Arguments go to pytest: test.sh -k layernorm_mlp -x
#
#   TE_TEST_WORKERS   processes that run tests side by side: one for each core by default, six at most where there is a GPU
set -euo pipefail
repo="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
cd "$repo"

python="$(bash build_tools/setup_env.sh test)"
export PYTHONPATH="$repo${PYTHONPATH:+:$PYTHONPATH}"

cores="$("$python" -c 'import os; print(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())')"
workers="${TE_TEST_WORKERS:-$cores}"
if [ -z "${TE_TEST_WORKERS:-}" ] && [ "$workers" -gt 6 ] &&
    "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    workers=6
fi
# One thread in each process: the processes already fill the cores.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
export TORCHINDUCTOR_COMPILE_THREADS="${TORCHINDUCTOR_COMPILE_THREADS:-1}"

# Code compiled from other sources is never found again (dynamo/cache_key.py puts a digest of them into the keys of
# torch's compile caches). The cache is therefore kept for these very sources, and older ones go.
if [ -z "${TORCHINDUCTOR_CACHE_DIR:-}" ]; then
    caches="$repo/.venv/inductor"
    key="$("$python" build_tools/source_digest.py)"
    mkdir -p "$caches/$key"
    find "$caches" -mindepth 1 -maxdepth 1 ! -name "$key" -exec rm -rf {} +
    export TORCHINDUCTOR_CACHE_DIR="$caches/$key"
fi

parallel=()
if [ "$workers" -gt 1 ] && "$python" -c 'import xdist' 2>/dev/null; then
    parallel=(-n "$workers" --dist worksteal)
fi

"$python" -c "
import torch, transformer_engine
device = torch.cuda.get_device_name() if torch.cuda.is_available() else 'CPU'
print(f'transformer_engine {transformer_engine.__version__}, torch {torch.__version__}, {device}, $workers workers')"
export TE_FEATURE_REPORT="${TE_FEATURE_REPORT:-$repo/.venv/features.json}"  # for build_tools/feature_table.py
mkdir -p "$(dirname "$TE_FEATURE_REPORT")"
exec "$python" -m pytest tests/pytorch -q ${parallel[@]+"${parallel[@]}"} --durations=10 "$@"
