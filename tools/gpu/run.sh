#!/usr/bin/env bash
# Check a machine with one GPU, without network: bash tools/gpu/run.sh FOLDER [--device standin]
# Needs torch, numpy and pytest, and tqdm for the main job.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
python="${PYTHON:-python3}"
paths="$root/tools"
for source in "$root"/packages/*/src; do paths="$paths:$source"; done
# The packages import xxhash. Without it they hash with blake2b here, which takes longer.
if [[ "${1:-}" == [!-]* ]] && ! "$python" -c "import xxhash" 2> /dev/null; then
    echo "gpu: xxhash is not installed: hashes are blake2b's, so saves, loads and hashes take longer"
    mkdir -p "$1/libraries"
    cat > "$1/libraries/xxhash.py" << 'END'
from functools import partial
from hashlib import blake2b

xxh3_64, xxh3_128 = partial(blake2b, digest_size=8), partial(blake2b, digest_size=16)


def xxh3_64_hexdigest(content):
    return xxh3_64(content).hexdigest()
END
    paths="$paths:$(cd "$1" && pwd)/libraries"
fi
export PYTHONPATH="$paths${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec "$python" -m gpu "$@"
