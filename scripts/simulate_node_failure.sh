#!/usr/bin/env bash
# Drops N ranks of a run on this machine, as the loss of a node would: SIGKILL to the N highest ranks.
#   scripts/simulate_node_failure.sh RUN_FOLDER [N]       (N: 1; SIGNAL=STOP hangs them instead)
# RUN_FOLDER is the folder of the run's records; run.lock in it names the process that leads the run. Ranks
# are those that it started (pentad's own), or that the same torchrun started beside it.
set -euo pipefail

folder="${1:?usage: simulate_node_failure.sh RUN_FOLDER [N]}"
number="${2:-1}"
signal="${SIGNAL:-KILL}"
lead="$(sed -n 's/^process \([0-9]*\) on .*/\1/p' "$folder/run.lock" 2>/dev/null || true)"
if [ -z "$lead" ] || ! kill -0 "$lead" 2>/dev/null; then
  echo "$folder: no run is under way in it" >&2
  exit 2
fi

# Lines "RANK PID" of the processes whose parent is $1.
ranks_below() {
  for stat in /proc/[0-9]*/stat; do
    pid="${stat%/stat}"; pid="${pid#/proc/}"
    rest="$(sed 's/.*) //' "$stat" 2>/dev/null)" || continue
    set -- "$1" $rest
    [ "$3" = "$1" ] && [ "$2" != Z ] || continue
    rank="$(tr '\0' ' ' <"/proc/$pid/cmdline" 2>/dev/null | sed -n 's/.* learner-\([0-9]*\) *$/\1/p')" || continue
    if [ -z "$rank" ]; then
      rank="$(tr '\0' '\n' <"/proc/$pid/environ" 2>/dev/null | sed -n 's/^RANK=//p')" || continue
    fi
    if [ -n "$rank" ]; then echo "$rank $pid"; fi
  done
}

found="$(ranks_below "$lead")"
if tr '\0' '\n' <"/proc/$lead/environ" | grep -q '^RANK='; then # torchrun started the others
  found="$found
$(ranks_below "$(sed 's/.*) //' "/proc/$lead/stat" | cut -d' ' -f2)" | grep -v "^0 " || true)"
fi
if ! grep -q . <<<"$found"; then
  echo "$folder: the run has no ranks of their own on this machine" >&2
  exit 2
fi
grep . <<<"$found" | sort -rn | head -n "$number" | while read -r rank pid; do
  kill -"$signal" "$pid"
  echo "SIG$signal to rank $rank, process $pid"
done
