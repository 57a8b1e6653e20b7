#!/bin/bash
# Runs tokenway_gin_probe on a machine with one H200 or several, over the sockets of tokenway_gin_plugin.so: all ranks are
# on this host, and NCCL is told to take each for a host of its own. Builds nothing.
#
#   tests/gin/run.sh FOLDER [RANKS [ROUNDS]]
#
# FOLDER has tokenway_gin_probe and tokenway_gin_plugin.so; libnccl.so.2 (2.30.7 or newer, of the build's headers or later)
# lies there too, or LD_LIBRARY_PATH leads to it. RANKS: by default 2 on each GPU if there is one, else one on each, at
# most 4. Ends with 0 if all passed; each run says first what is special about it.
set -u
folder=$(cd "${1:?folder of tokenway_gin_probe and tokenway_gin_plugin.so}" && pwd)
gpus=$(nvidia-smi --list-gpus | wc -l)
ranks=${2:-$((gpus == 1 ? 2 : (gpus < 4 ? gpus : 4)))}
rounds=${3:-100}
export LD_LIBRARY_PATH=$folder:${LD_LIBRARY_PATH:-}
export NCCL_RMA_PLUGIN=$folder/tokenway_gin_plugin.so
export NCCL_LSA_TEAM_SIZE=1 NCCL_MULTI_RANK_GPU_ENABLE=1 NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-lo} NCCL_NVLS_ENABLE=0
export NCCL_DEBUG=${NCCL_DEBUG:-WARN}

bad=0
run() {
  echo "--- $gpus GPUs, $ranks ranks, $rounds rounds: $*"
  env "${@:2}" timeout 280 "$folder/tokenway_gin_probe" "$ranks" "$rounds" || bad=1
}
run "in order, at once"
run "what may overtake does, late" TOKENWAY_GIN_SEED=1 TOKENWAY_GIN_DELAY_US=300
echo "$([ $bad = 0 ] && echo PASSED || echo FAILED)"
exit $bad
