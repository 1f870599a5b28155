#!/usr/bin/env bash
# Runs the whole suite several times on the present commit, every second time beside a second platform under load
# (examples/burst, again and again): tools/repeat.sh [RUNS]. Prints the last line of each run; ends with 1 if one of them failed.
set -euo pipefail
cd "$(dirname "$0")/.."
runs=${1:-4}
logs=build/repeat
mkdir -p "$logs"
status=0
load=""
end_load() {
    [ -z "$load" ] || { kill -INT -- "-$load" 2>/dev/null || true; wait "$load" 2>/dev/null || true; }
    load=""
}
trap end_load EXIT

for run in $(seq "$runs"); do
    beside="alone"
    if [ $((run % 2)) -eq 0 ]; then
        beside="beside load"
        set -m # the load gets a process group of its own, so that it ends as a whole
        (while .venv/bin/python examples/burst/run.py; do :; done) >"$logs/load-$run.log" 2>&1 &
        load=$!
        set +m
    fi
    make test >"$logs/run-$run.log" 2>&1 || status=1
    if [ -n "$load" ] && ! kill -0 "$load" 2>/dev/null; then
        echo "repeat: the load ended early; see $logs/load-$run.log"
        status=1
    fi
    end_load
    echo "run $run, $beside: $(grep -E '^=+ .*(passed|failed|error).* =+$' "$logs/run-$run.log" | tail -1)"
done
exit "$status"
