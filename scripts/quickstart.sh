#!/usr/bin/env bash
# The whole story in one command: set up, fetch the model, answer a long prompt exactly and filled in turn.
#
#   scripts/quickstart.sh [--seed N | --seeds A-B] [--repeats N] [--calibrate]
#     --seed N      code, position and filler of the prompt (default: 1)
#     --seeds 1-10  several prompts, a table, results/quickstart-seeds.json
#     --calibrate   make the maps anew from text, into out/, instead of using the shipped ones
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

calibrate= arguments=()
for arg; do
    case $arg in
        --calibrate) calibrate=1 ;;
        -h | --help) sed -n '2,7s/^# \{0,1\}//p' "$0"; exit ;;
        *) arguments+=("$arg") ;;
    esac
done

"$root/scripts/setup.sh"
model=$("$root/.venv/bin/python" "$root/scripts/fetch_model.py")
if [ -n "$calibrate" ]; then
    maps="$root/out/SmolLM2-135M-Instruct.ridge.gguf"
    "$root/models/make_smollm2.sh" "$maps"
    arguments+=(--maps "$maps")
fi
printf '\n== %s\n' "quick start with $(basename "$model")"
exec "$root/.venv/bin/python" "$root/scripts/quickstart.py" "${arguments[@]+"${arguments[@]}"}"
