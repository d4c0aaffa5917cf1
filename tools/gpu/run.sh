#!/usr/bin/env bash
# Check a machine with one GPU, without network: bash tools/gpu/run.sh FOLDER [--device standin]
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
paths="$root/tools"
for source in "$root"/packages/*/src; do paths="$paths:$source"; done
export PYTHONPATH="$paths${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec "${PYTHON:-python3}" -m gpu "$@"
