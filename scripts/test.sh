#!/usr/bin/env bash
# All tests, on a bare machine: both builds, the packages of the tests, pytest. Arguments go to pytest. RIDGE_TEST_HF=1 also
# installs torch, transformers and datasets; without them the tests that need them are skipped.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

scripts/setup.sh --stock --test
[ -z "${RIDGE_TEST_HF:-}" ] || .venv/bin/pip install --quiet torch==2.13.0 transformers datasets
.venv/bin/python scripts/fetch_model.py
exec .venv/bin/python -m pytest -q --durations=15 "$@"
