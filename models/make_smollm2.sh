#!/usr/bin/env bash
# Make the sidecars of SmolLM2-135M-Instruct anew from text:
#     models/make_smollm2.sh OUT.gguf      maps by the recipe that tune found (split 20, kind kv), into one file
#     models/make_smollm2.sh               both that are shipped here, in place: tune's, and one of a lower split
# The model runs as an F32 copy of the Q4_1 file: the same weights, more than twice as fast on a CPU.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

"$root/scripts/fetch_text.sh" "$root/out/text"
model=$("$root/.venv/bin/python" "$root/scripts/fetch_model.py")
copy=$root/out/smollm2-f32.gguf
if [ ! -f "$copy" ]; then
    log=$(mktemp)
    "$root/build/bin/llama-quantize" --allow-requantize "$model" "$copy.part" F32 >"$log" 2>&1 || { cat "$log" >&2; exit 1; }
    rm "$log"
    mv "$copy.part" "$copy"
fi

calibrate() {
    "$root/.venv/bin/ridgefill-calibrate" "$copy" --for "$model" --text "$root/out/text" --map-type q8_0 \
        --kind kv --threads "${RIDGE_THREADS:-2}" --force "$@"
}
if [ $# -gt 0 ]; then
    calibrate --out "$1" --split 20 --n-tokens 60000 --heldout-documents 5 --overlap drop
else
    "$root/.venv/bin/ridgefill" tune "$copy" --for "$model" --text "$root/out/text" --overlap drop \
        --threads "${RIDGE_THREADS:-2}" --out "$root/out/smollm2.tuned.gguf" --force
    cp "$root/out/smollm2.tuned.gguf" "$root/models/smollm2-135m-instruct.s20.q8_0.ridge.gguf"
    calibrate --out "$root/models/smollm2-135m-instruct.s15.q8_0.ridge.gguf" --split 15 \
        --n-tokens 220000 --heldout-documents 9 --overlap keep
fi
