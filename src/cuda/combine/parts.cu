// How many rows of each pair of ranks belong to the parts of a combine, before its first part. Slots ascend with their
// tokens, so the rows of a part are a range of slots at both ends: the owner finds where it begins in the marks that
// the exchange of counts has made, and the rank that returns rows by a search in the tokens of their headers.
//
// Takes PartsParams; gives the handle's DeviceArrays::part_counts. Nothing is sent.
//
// What breaks if this changes: both ends must find the same ranges (S4, S10), else rows are waited for that nobody
// sends.
#include <cuda_runtime.h>

#include "cuda/device/block.cuh"
#include "cuda/device/ptx.cuh"
#include "cuda/launch/combine.h"
#include "cuda/launch/launch.h"
#include "cuda/launch/loading.h"

namespace tw::cuda {
namespace {

// Gives how many of a source's rows are of tokens before `token`, by a warp: in each round its threads look at 32 rows
// that cut what is left into equal ranges.
__device__ int rows_before(const PartsParams& p, int source, int token) {
  const int64_t row = 1 + p.group.map.shape().top_k;
  const uint64_t* const headers = p.handle.meta + p.handle.source[source] * row;
  int begin = 0;
  int end = p.handle.counts[source];
  while (begin < end) {
    const int each = (end - begin + 31) / 32;
    const int at = begin + lane() * each;
    const bool before = at < end && static_cast<int>(load_fresh<unsigned long long>(headers + at * row)) < token;
    const int passed = __popc(__ballot_sync(~0u, before));
    if (passed == 0) return begin;
    end = min(end, begin + passed * each);
    begin += (passed - 1) * each + 1;
  }
  return begin;
}

// Gives how many of this rank's tokens before `token` have a row that went to a rank.
__device__ int sent_before(const PartsParams& p, int rank, int token) {
  const int sent = p.handle.send_counts[rank];
  if (token >= p.tokens) return sent;
  const GroupMarks& marks = p.handle.marks[int64_t{token / kGroup} * p.group.map.shape().ranks + rank];
  return min(sent, marks.before + __popc(marks.going & below(token % kGroup)));
}

__global__ void __launch_bounds__(kThreads) parts_kernel(const __grid_constant__ PartsParams p) {
  const Shape& shape = p.group.map.shape();
  const int all = (p.parts + 1) * shape.ranks;
  for (int i = static_cast<int>(blockIdx.x * kWarps + threadIdx.x / 32); i < all;
       i += static_cast<int>(gridDim.x) * kWarps) {
    const int rank = i % shape.ranks;
    // Beyond the last token of every rank: int is wide enough, as max_tokens has 28 bits and parts are no more.
    const int token = i / shape.ranks < p.parts ? i / shape.ranks * shape.part_tokens() : INT32_MAX;
    const int received = rows_before(p, rank, token);
    if (lane() != 0) continue;
    int32_t* const counts = p.counts + 2 * (i / shape.ranks) * shape.ranks + rank;
    counts[0] = received;
    counts[shape.ranks] = sent_before(p, rank, token);
  }
}

}  // namespace

int launch_parts(const PartsParams& params, void* stream) {
  const int pairs = (params.parts + 1) * params.group.map.shape().ranks;
  return launch_kernel(parts_kernel, params, (pairs + kWarps - 1) / kWarps, 0, false, stream);
}

int load_parts() { return allow_shared(reinterpret_cast<const void*>(parts_kernel), 0); }

}  // namespace tw::cuda
