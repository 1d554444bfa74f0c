#!/bin/sh
# All benchmarks and experiments in order, then the pages that are made from what they found.
#
#     tools/bench/all.sh                        # everything; the machine should have nothing else to do
#     tools/bench/all.sh core packing           # only these benchmarks, then the page
#     EXPERIMENTS=no tools/bench/all.sh         # no experiments
#
# What each found stays in build/bench/NAME.json until it is run again. It goes on after one that failed, and fails then.
set -u
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-.venv/bin/python}
OUT=build/bench
mkdir -p "$OUT"
failed=""

names=${*:-core simulate packing wire trainer controller log log_files rewards rewards_lag swap view async_vs_sync}
for name in $names; do
    echo "== $name"
    "$PYTHON" "tools/bench/$name.py" --json "$OUT/$name.json" || failed="$failed $name"
done
"$PYTHON" tools/bench/table.py "$OUT"/*.json || failed="$failed table"

if [ "${EXPERIMENTS:-yes}" = yes ] && [ $# = 0 ]; then
    for name in when_older decoupled_vs_naive; do
        echo "== $name"
        "$PYTHON" "tools/experiments/$name.py" || failed="$failed $name"
    done
    "$PYTHON" tools/experiments/page.py || failed="$failed page"
fi

[ -z "$failed" ] || { echo "failed:$failed" >&2; exit 1; }
