// The exchange of counts (high throughput), the choice of physical experts by the quotas of a batch, and the layout of
// a routing: what their kernels take by value, and the launches.
//
// Results go into the handle's arrays (HandleView) and, where the host wants them, into CountsOnHost.
//
// What breaks if this changes: the exchange of counts is a step like any other (S1 to S9), and the marks that it leaves
// in the handle are the slots of every later dispatch (S9); `serial` tells the host's exchanges apart.
#pragma once

#include <cstddef>
#include <cstdint>
#include "cuda/launch/group_view.h"
#include "exchange/routing_layout.h"

namespace tw::cuda {

// One exchange of counts as its kernel sees it.
struct CountsParams {
  GroupView group;
  HandleView handle;
  IdsIn in;
  int32_t* told;  // [N + E] rows for each rank and expert, while they are counted; otherwise 0
  int32_t channel;
  int32_t bank;  // the bank of the step, over a staged transport; else -1
  int32_t tokens;
  int32_t room;       // rows of all sources that a rank may receive
  int32_t alignment;  // rows that an expert's block is padded to a multiple of, in the grouped layout
  uint32_t growth;    // Context::growth, which ranks must have alike
  int32_t drop;       // 1: leave out rows beyond a receiver's room instead of refusing the call
  uint64_t receive_offset[kMaxPayloads];  // as in CountsCall
  int32_t send;
  int32_t receive;
  CountsOnHost* on_host;  // NULL: the host does not want them
  int32_t* expert_rows;   // its expert_rows()
  uint64_t serial;        // written behind the results, so that the host sees they are there
};

// Chooses physical experts by the quotas of the batch and writes them into the handle (counts/balance.cu). For a layout
// the ids are all that the handle has: other arrays are NULL, and channel is -1, as there is no step.
struct BalanceParams {
  GroupView group;
  HandleView handle;
  IdsIn in;
  int32_t* scratch;  // [E + N + P]; NULL: shared memory has room
  int32_t channel;
  int32_t bank;  // the bank of the step that follows; -1: it takes any
  int32_t tokens;
  twPhase_t phase;

  static uint32_t scratch_words(const Shape& shape) {
    return static_cast<uint32_t>(shape.logical_experts + shape.ranks + shape.experts);
  }
  static bool fits(const Shape& shape) { return scratch_words(shape) <= kMaxTable; }
};

// Finds the layout of a routing (counts/layout.cu). tokens_per_rank and tokens_per_expert are 0 before.
struct LayoutParams {
  GroupView group;
  IdsIn in;
  const int32_t* chosen;  // [T, K] physical experts, where an earlier kernel has chosen them: layout.physical_ids, or
                          // NULL
  int32_t tokens;
  RoutingLayout layout;
};

// All return a cudaError_t as int, so that the host side needs no CUDA header.
int launch_counts(const CountsParams& params, int grid, void* stream);
int launch_balance(const BalanceParams& params, void* stream);
// The same by a map that moves, without quotas. `early`: see launch.h.
int launch_choose(const BalanceParams& params, int most_blocks, bool early, void* stream);
int launch_layout(const LayoutParams& params, int grid, void* stream);

}  // namespace tw::cuda
