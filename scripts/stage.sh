#!/usr/bin/env bash
# Runs one stage of a make target: heading, command, elapsed seconds.
#
#   scripts/stage.sh "title" command arguments...
#
# A stage that hangs is ended after TW_STAGE_TIMEOUT seconds (default 3600) and fails.
set -uo pipefail
title=$1
shift
if [[ -t 1 ]]; then bold=$'\e[1m' red=$'\e[31m' off=$'\e[0m'; else bold='' red='' off=''; fi

printf '\n%s==> %s%s\n' "$bold" "$title" "$off"
# timeout makes a process group of its own, out of the terminal's reach: pass on what ends us.
timeout --verbose --kill-after=30 "${TW_STAGE_TIMEOUT:-3600}" "$@" &
trap 'kill -TERM $! 2> /dev/null' INT TERM
wait $!
status=$?
while kill -0 $! 2> /dev/null; do wait $!; done  # a signal has ended the wait, not yet the command
if [[ $status == 0 ]]; then
  printf '%s<== %s: ok, %d s%s\n' "$bold" "$title" "$SECONDS" "$off"
else
  printf '%s<== %s: FAILED (exit %d), %d s%s\n' "$bold$red" "$title" "$status" "$SECONDS" "$off" >&2
fi
exit "$status"
