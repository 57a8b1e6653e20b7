#!/usr/bin/env bash
# Runs C++ tests as two processes with half of them each: most tests keep one core busy at a time.
#
#   tests/cc/run.sh build/tsan/tokenway_tests
set -uo pipefail
export GTEST_TOTAL_SHARDS=2 GTEST_BRIEF=1

GTEST_SHARD_INDEX=0 "$@" &
first=$!
GTEST_SHARD_INDEX=1 "$@"
second=$?
wait "$first" && exit "$second"
