#!/usr/bin/env bash
# All tests, on a bare machine: both builds, the packages of the tests, pytest. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

scripts/setup.sh --stock --test
.venv/bin/python scripts/fetch_model.py
exec .venv/bin/python -m pytest -q --durations=15 "$@"
