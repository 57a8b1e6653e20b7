// A handle: one routing, cached, with what its last dispatch and exchange of counts brought. Its arrays lie in one
// block, the group's or the caller's. `channel` and `pending` say what may follow; `channel` must be alike on all ranks
// after the same calls (S5), also where one rank refused (`refused` is for that), or ranks lease different channels.
#pragma once

#include <optional>
#include <vector>

#include "core/backend.h"
#include "core/quarantine.h"

struct twGroup;

namespace tw {

// Points a handle's arrays into its block and returns the bytes that they take there; where the block is NULL, it only
// returns the bytes. Sizes are the group's maxima, so that blocks are alike and can be reused.
uint64_t place_arrays(const Shape& shape, int32_t local_experts, int id_bytes, bool on_device, std::byte* block,
                      HandleArrays* arrays);

enum class Pending { kNone, kDispatch, kCombine, kCounts };

}  // namespace tw

struct twHandle : tw::Quarantined<twHandle>, tw::HandleArrays {
  twGroup* group = nullptr;
  std::byte* block = nullptr;
  bool owns_block = false;
  // What its arrays have room for: the group's sizes when it was made. The group may have grown since.
  int32_t max_tokens = 0;
  int64_t most_rows = 0;

  int channel = -1;         // held, or lent to a combine under way
  bool dispatched = false;  // `received` is good: a combine may follow
  bool exact = false;       // the last dispatch was one of high throughput, also where this rank refused it
  bool refused = false;     // this rank refused its last dispatch, and the peers' hosts may not know
  // Why no dispatch or exchange of counts can take this routing. It is said in those calls, not where it was routed:
  // peers wait there, and hear of the refusal at once; a rank that routes and goes on to something else disturbs
  // nobody.
  tw::Status too_many;
  int32_t bound = 0;  // bound of the last dispatch
  tw::Pending pending = tw::Pending::kNone;
  bool channel_for_this_step = false;  // a combine without a lease: give the channel back when it ends
  tw::DispatchCall dispatch;           // what twComplete finishes
  tw::CombineCall combine;
  tw::CountsCall counting;
  tw::KnownCounts counted;  // what the host knows of the exchange of counts
  // Whether outputs have as many rows as come, instead of as many as there is room for. The first dispatch of these
  // counts decides; before it, this says whether the host knows how many come.
  std::optional<bool> sizing;
  bool is_sized() const { return sizing.value_or(counted.known); }
  // A graph holds a dispatch or combine whose tensors are as large as these counts: replays with other counts would go
  // beyond them.
  bool sized_in_graph = false;
  // A graph holds a call of this handle that depends on its counts: replays go on with the room and the alignment of
  // these, so no later exchange may have others.
  bool in_graph = false;
  // In groups with leases: the next dispatch's rows go where the last exchange of counts has announced, as on all
  // ranks.
  bool has_offsets = false;
  std::vector<std::byte*> leases;                        // leases that peers may write to until the dispatch has ended
  tw::TimePoint counts_deadline = tw::TimePoint::max();  // deadline of a wait that counts_ready has begun
};

namespace tw {

// The bound of a dispatch that names none: the max_tokens that the group had when the handle was made, or
// low_latency_tokens. `shape`: that of the call's rows; NULL: no handle is known.
int32_t default_bound(const Shape& shape, const twHandle* handle);

}  // namespace tw
