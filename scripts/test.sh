#!/usr/bin/env bash
# All tests, on a bare machine: both builds, the packages of the tests, pytest, ctest. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

scripts/setup.sh --stock --test
.venv/bin/python scripts/fetch_model.py

status=0
.venv/bin/python -m pytest -q --durations=15 "$@" || status=$?
ctest --test-dir build --output-on-failure --no-tests=ignore || status=$?
exit $status
