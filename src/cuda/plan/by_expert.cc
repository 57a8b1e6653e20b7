// The plan of a dispatch straight to experts: by_expert.h tells what it reads and writes.
//
// What breaks if this changes: a call that the kernel cannot do must not get it. Blocks keep S8 by packet_roles.
#include "cuda/plan/by_expert.h"

#include <algorithm>

#include "cuda/plan/tiles.h"

namespace tw::cuda {
namespace {

// Whether the kernel can do the call: a whole step of packets, in blocks of their own, of rows that it stores 8 bytes
// at a time, and as many slots and experts as a block can count.
bool can(const DispatchParams& p, const Shape& shape, const ByExpertFacts& facts, const ByExpertScratch& at) {
  const bool whole = p.send != 0 && p.receive != 0 && p.roles.apart != 0;
  if (p.kind != Kind::kPackets || !whole || !facts.by_expert || facts.columns || facts.width < 8) return false;
  return int64_t{shape.ranks} * p.bound <= kMostSlots && facts.local_experts <= INT16_MAX && at.bytes <= kMostShared;
}

}  // namespace

bool plan_by_expert(const Budget& budget, const Shape& shape, const ByExpertFacts& facts, ByExpertParams* params) {
  DispatchParams& p = params->call;
  params->at = ByExpertScratch::make(shape, p.bound, facts.local_experts, p.at.bytes);
  if (!can(p, shape, facts, params->at)) return false;
  // Fewer SMs copy more slowly than the kernel behind the dispatch, which waits for nobody and may have all of them.
  if (2 * budget.max_grid < budget.device_sms) return false;
  if (p.tiles.tile_groups > kByExpertGroups) {
    const int64_t warps = int64_t{budget.max_grid} * kWarps / 2;
    p.tiles = tiles_of(p.tiles.words, words_of(meta_bytes(shape.top_k)), p.bound, warps, kByExpertGroups);
  }
  const Tuning& tuning = *budget.tuning;
  const int64_t rows = std::max<int64_t>(p.tokens, int64_t{shape.ranks} * p.bound);
  p.roles = packet_roles(budget, rows, p.tiles, true, tuning.packet_dispatch_sends, tuning.busy);
  params->rest = Divider::make(std::max(p.tiles.per_row.divisor, 2u) - 1);
  params->slots = Divider::make(static_cast<uint32_t>(p.bound));
  params->ranks = Divider::make(static_cast<uint32_t>(shape.ranks));
  return true;
}

}  // namespace tw::cuda
