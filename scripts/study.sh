#!/usr/bin/env bash
# What fills cost SmolLM2 and the pico models: maps, `ridgefill evaluate`, results in results/study/ and their tables in docs/RESULTS.md.
#
#   scripts/study.sh [--quick] [MODEL...]
#     MODEL    smollm2, or a folder of models/pico with its GGUF [default: all, with --quick smollm2 and pico-qwen3-s]
#     --quick  small sizes: shows that everything works, and measures little. Writes to out/study-quick/ alone
#
# A run that was stopped goes on with the same command; what is finished is not measured again. Needs the build (scripts/setup.sh).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bin=.venv/bin threads=${RIDGE_THREADS:-2} text=out/text
work=out/study results=results/study page=docs/RESULTS.md quick=
models=()
for arg; do
    case $arg in
        --quick)   quick=1 work=out/study-quick results=out/study-quick/results page=out/study-quick/RESULTS.md ;;
        -h|--help) sed -n '2,9s/^# \{0,1\}//p' "$0"; exit ;;
        -*)        echo "study.sh: unknown option $arg (expected --quick)" >&2; exit 2 ;;
        *)         models+=("$arg") ;;
    esac
done
if [ ${#models[@]} -eq 0 ] && [ -n "$quick" ]; then
    models=(smollm2 pico-qwen3-s)
elif [ ${#models[@]} -eq 0 ]; then
    models=(smollm2)
    for gguf in models/pico/*/*.f16.gguf; do models+=("$(basename "$(dirname "$gguf")")"); done
fi

say() { printf '\n== %s\n' "$*"; }

calibrate() { # MODEL.gguf NAME, then options: maps work/NAME.s{split}.{kind}.gguf
    local model=$1 name=$2
    shift 2
    [ -e "$work/$name.maps" ] && return
    say "maps of $name"
    "$bin/ridgefill-calibrate" "$model" --text "$text" --overlap drop --threads "$threads" --force "$@" \
        --sums "$work/$name.sums.npz" --out "$work/$name.s{split}.{kind}.gguf"
    touch "$work/$name.maps"
}

evaluate() { # MODEL.gguf NAME, then options: results/NAME.json
    local model=$1 name=$2 rc=0 found
    shift 2
    say "$name"
    "$bin/ridgefill" evaluate "$model" --text "$text" --threads "$threads" --out "$work/$name" "$@" || rc=$?
    [ $rc = 0 ] || [ $rc = 6 ] || exit $rc # 6: finished before
    found=("$work/$name"/*/result.json)
    [ ${#found[@]} = 1 ] || { echo "study.sh: expected one finished result in $work/$name, found ${#found[@]}: remove the old ones" >&2; exit 1; }
    "$bin/python" -m json.tool --compact "${found[0]}" "$results/$name.json"
}

join() { local IFS=,; echo "$*"; }

# arms of a split: nothing and the state at the split in the place of filled rows, then each kind of maps
arms_of() { # SPLIT KIND...
    local split=$1 arms=(nofill-S$1 identity-S$1)
    shift
    for kind; do arms+=("fill-S$split:$kind"); done
    join "${arms[@]}"
}

# a tenth of the filled rows exact, chosen in three ways
rows_of() { join "$1+attention=0.1" "$1+random=0.1" "$1+tail=0.1"; }

smollm2() {
    local model=out/smollm2-f32.gguf maps=() arms=exact,noise,cut,pop
    if [ ! -f "$model" ]; then
        local shipped
        shipped=$("$bin/python" scripts/fetch_model.py)
        build/bin/llama-quantize --allow-requantize "$shipped" "$model.part" F32 >/dev/null 2>&1
        mv "$model.part" "$model"
    fi
    if [ -n "$quick" ]; then
        for s in 15 20; do maps+=(--maps "models/smollm2-135m-instruct.s$s.q8_0.ridge.gguf"); done
        arms=exact,noise,cut,$(arms_of 15 kv),$(rows_of fill-S15:kv),fill-S20:kv
        evaluate "$model" smollm2 "${maps[@]}" --sets loss,single --arms "$arms" --documents 2 --prefix 320 --tail 64 --scored 32 --decode 12 \
            --items 2 --rows 320 --item-tail 96
        return
    fi
    calibrate "$model" smollm2 --split 15 --split 18 --split 19 --kind input --kind kv --kind kv_prev --n-tokens 110000
    for m in s15.input s15.kv s15.kv_prev s18.kv s18.kv_prev s19.input; do maps+=(--maps "$work/smollm2.$m.gguf"); done
    arms+=,$(arms_of 15 input kv kv_prev),$(rows_of fill-S15:kv),fill-S18:kv,fill-S18:kv_prev,identity-S19,fill-S19:input
    evaluate "$model" smollm2 "${maps[@]}" --sets loss,single --arms "$arms" --documents 20 --prefix 2048 --tail 256 --scored 256 \
        --decode 24 --items 48 --rows 1024 --item-tail 128
    evaluate "$model" smollm2-splices --maps "$work/smollm2.s15.kv.gguf" --sets splices --items 12 --rows 768 --item-tail 96
}

pico() { # NAME
    local name=$1 model=models/pico/$1/$1.f16.gguf maps=() arms=exact,noise,cut,pop splits kinds=(input kv kv_prev) options
    [ -f "$model" ] || { echo "study.sh: expected a model $model, found none: scripts/train_pico.py $name" >&2; exit 1; }
    # every split with a layer above it, from the second on
    splits=$("$bin/python" -c 'import sys; from ridgefill.model_file import ModelFile as M; m = M(sys.argv[1])
print(*range(2, m.get(m.get("general.architecture") + ".block_count") - 1))' "$model")
    local all=($splits)
    local shallow=${all[0]} middle=" ${all[*]:$((${#all[@]} / 2)):2} " # the two in the middle, where a choice of rows can make a difference
    local sizes=(--documents 20 --prefix 512 --tail 96 --scored 128 --decode 24 --items 120 --rows 512 --item-tail 96)
    options=(--n-tokens 60000)
    if [ -n "$quick" ]; then
        splits="3 5" shallow=3 middle=" 3 " kinds=(kv) sizes=(--documents 3 --prefix 320 --tail 64 --scored 32 --decode 12 --items 8 --rows 320 --item-tail 96)
        options=(--n-tokens 8000 --heldout-documents 2 --no-score)
    fi
    # shellcheck disable=SC2086,SC2046  # lists of words
    calibrate "$model" "$name" $(printf -- '--split %s ' $splits) $(printf -- '--kind %s ' "${kinds[@]}") "${options[@]}"
    for s in $splits; do
        arms+=,$(arms_of "$s" "${kinds[@]}")
        [[ $middle != *" $s "* ]] || arms+=,$(rows_of "fill-S$s:kv")
        for k in "${kinds[@]}"; do maps+=(--maps "$work/$name.s$s.$k.gguf"); done
    done
    evaluate "$model" "$name" "${maps[@]}" --sets loss,single,passwords --arms "$arms" "${sizes[@]}"
    evaluate "$model" "$name-splices" --maps "$work/$name.s$shallow.kv.gguf" --sets splices "${sizes[@]}" --items $((quick ? 4 : 24))
}

scripts/fetch_text.sh "$text"
mkdir -p "$work" "$results"
for name in "${models[@]}"; do
    if [ "$name" = smollm2 ]; then smollm2; else pico "$name"; fi
done
"$bin/python" scripts/results_tables.py "$results" "$page"
say "results in $results, tables in $page"
