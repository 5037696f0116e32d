#!/usr/bin/env bash
# Make the sidecars of SmolLM2-135M-Instruct anew from text (the last run took 22 minutes of one core):
#     models/make_smollm2.sh OUT.gguf      split 19, the quick start's, into one file
#     models/make_smollm2.sh               splits 15 and 19, into the files that are shipped here
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

"$root/scripts/fetch_text.sh" "$root/out/text"
model=$("$root/.venv/bin/python" "$root/scripts/fetch_model.py")
if [ $# -gt 0 ]; then
    what=(--out "$1" --split 19)
else
    what=(--out "$root/models/smollm2-135m-instruct.s{split}.q8_0.ridge.gguf" --split 15 --split 19)
fi
exec "$root/.venv/bin/ridgefill-calibrate" "$model" "${what[@]}" --text "$root/out/text" \
    --map-type q8_0 --n-tokens 105000 --heldout-documents 5 --threads "${RIDGE_THREADS:-2}" --force
