#!/usr/bin/env bash
# All tests, on a bare machine: both builds, the packages of the tests, pytest. Arguments go to pytest. RIDGE_TEST_ALL=1 also
# installs torch, transformers, datasets and (Debian, as root) chromium; without them the tests that need them are skipped.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

scripts/setup.sh --stock --test
if [ -n "${RIDGE_TEST_ALL:-}" ]; then
    .venv/bin/pip install --quiet torch==2.13.0 transformers datasets
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null && ! command -v chromium >/dev/null; then
        apt-get update -qq || true
        DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium >/dev/null ||
            echo "test.sh: chromium could not be installed; the test of the report in a browser is skipped" >&2
    fi
fi
.venv/bin/python scripts/fetch_model.py
exec .venv/bin/python -m pytest -q --durations=15 "$@"
