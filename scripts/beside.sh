#!/usr/bin/env bash
# Runs two commands side by side. What the first says is shown as it says it, what the second says when it has ended.
#
#   scripts/beside.sh 'command in front' 'command behind'
#
# The one behind gives way (nice): in front are tests whose ranks wait for each other, which leave a third of the time
# over. One that fails ends the other too, and its exit status is the script's. Needs bash 5.1 (wait -p).
set -uo pipefail
said=$(mktemp)
bash -c "exec $1" &
front=$!
nice -n 4 bash -c "exec $2" > "$said" 2>&1 &
behind=$!

# Whatever happens, all that was said is shown, and nobody goes on.
finish() {
  local left
  left=$(jobs -pr)
  [[ -z $left ]] || kill -TERM $left 2> /dev/null
  wait
  cat "$said"
  rm -f "$said"
}
trap finish EXIT
trap 'exit 143' INT TERM

wait -n -p first "$front" "$behind" || exit
if [[ $first == "$front" ]]; then
  wait "$behind"
else
  cat "$said"
  : > "$said"
  wait "$front"
fi
