#!/usr/bin/env bash
# Set up: .venv, Python packages (no torch), and the build in build/. Run it again at any time; it does what is missing.
#
#   scripts/setup.sh [--stock] [--test]
#     --stock   also build the unpatched libllama and tools in build-stock/ (the reference of the tests)
#     --test    also install what the tests need (pytest, ...)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

stock= extras=
for arg; do
    case $arg in
        --stock) stock=1 ;;
        --test)  extras=test ;;
        -h | --help) sed -n '2,6s/^# \{0,1\}//p' "$0"; exit ;;
        *) echo "setup.sh: unknown argument $arg (expected --stock or --test)" >&2; exit 2 ;;
    esac
done

say() { printf '\n== %s\n' "$*"; }

# Debian packages for programs that are missing. Elsewhere, or without root, the message says what to install.
missing=()
for pair in g++:g++ patch:patch; do
    command -v "${pair%%:*}" >/dev/null || missing+=("${pair##*:}")
done
python=$(command -v python3) || { echo "setup.sh: python3 (3.10 or newer) is needed" >&2; exit 1; }
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
    { echo "setup.sh: expected Python 3.10 or newer, found $("$python" --version)" >&2; exit 1; }
"$python" -c 'import ensurepip, venv' 2>/dev/null || missing+=(python3-venv)
as_root=
[ "$(id -u)" = 0 ] && command -v apt-get >/dev/null && as_root=1
if [ -n "$as_root" ] && { [ ${#missing[@]} -gt 0 ] || ! command -v ccache >/dev/null; }; then
    say "Debian packages: ${missing[*]} ccache"
    apt-get update -qq || true
    # ccache only makes a second build faster; a machine without it is set up all the same
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends ccache >/dev/null || true
    [ ${#missing[@]} -eq 0 ] ||
        DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
elif [ ${#missing[@]} -gt 0 ]; then
    echo "setup.sh: please install: ${missing[*]} (Debian: apt-get install ${missing[*]})" >&2
    exit 1
fi

[ -x .venv/bin/python ] || { say "virtual environment .venv"; "$python" -m venv .venv; }
export PATH="$PWD/.venv/bin:$PATH" VIRTUAL_ENV="$PWD/.venv" PIP_DISABLE_PIP_VERSION_CHECK=1

# pip runs again only when the list of packages changed; a set-up for the tests covers one without them
stamp=.venv/ridge-packages
want=$(sha256sum pyproject.toml | cut -d' ' -f1)
if ! grep -qsx "$want ${extras:-none}" "$stamp" && ! { [ -z "$extras" ] && grep -qsx "$want test" "$stamp"; }; then
    say "Python packages${extras:+ (with those of the tests)}"
    # llama-cpp-python without a libllama of its own; our package without a build of its own: it uses build/bin
    CMAKE_ARGS=-DLLAMA_BUILD=OFF pip install --quiet --no-binary llama-cpp-python \
        --editable ".${extras:+[$extras]}" --config-settings=wheel.cmake=false
    command -v cmake >/dev/null || pip install --quiet 'cmake>=3.21'
    command -v ninja >/dev/null || pip install --quiet ninja
    echo "$want ${extras:-none}" >"$stamp"
fi

build() { # folder, CMake options
    local dir=$1
    shift
    say "build in $dir/"
    local log="$dir/setup.log"
    mkdir -p "$dir"
    cmake -B "$dir" -G Ninja -DPython3_EXECUTABLE="$PWD/.venv/bin/python" "$@" >"$log" 2>&1 ||
        { tail -n 40 "$log"; exit 1; }
    grep '^-- ridgefill' "$log" || true
    cmake --build "$dir" --target binaries --parallel "$(nproc 2>/dev/null || echo 2)" >>"$log" 2>&1 ||
        { grep -E -A12 'FAILED|error:' "$log" | tail -n 60; exit 1; }
}

build build
[ -z "$stock" ] || build build-stock -DRIDGE_PATCH=OFF
say "ready: binaries in build/bin, Python in .venv/bin"
