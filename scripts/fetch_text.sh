#!/bin/sh
# Fetch real text from Debian packages and write it as documents: scripts/fetch_text.sh [OUT, default out/text]
# Packages are downloaded and unpacked, not installed: no root needed. Licences: scripts/make_text.py and OUT/sources.json.
set -eu

root=$(cd "$(dirname "$0")/.." && pwd)
out=${1:-$root/out/text}
packages="r-cran-janeaustenr python3.11-doc libpython3.11-stdlib debian-handbook debian-reference-en jargon-text"

for tool in apt-get dpkg-deb; do
    command -v "$tool" >/dev/null || { echo "fetch_text: $tool not found: this needs a Debian system" >&2; exit 1; }
done

if [ -f "$out/sources.json" ]; then
    echo "$out: already there"
    exit 0
fi

tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
cd "$tmp"
if ! apt-get download -qq $packages 2>log; then
    # a bare image has no package lists yet
    apt-get update -qq 2>>log && apt-get download -qq $packages 2>>log || {
        cat log >&2
        echo "fetch_text: expected the packages of Debian 12, found $(. /etc/os-release && echo "$PRETTY_NAME")" >&2
        exit 1
    }
fi
for p in $packages; do
    dpkg-deb -x "$p"_*.deb "$p"
    echo "$p $(dpkg-deb -f "$p"_*.deb Version)" >>versions.txt
done

python=$root/.venv/bin/python
[ -x "$python" ] || python=python3
PYTHONPATH="$root/python" "$python" "$root/scripts/make_text.py" "$tmp" "$out"
