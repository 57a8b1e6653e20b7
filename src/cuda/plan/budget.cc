// Budgets and block counts: budget.h tells what they are.
//
// Pure: takes the device's SMs, the shape, the caller's sm_limit and the tuning; gives numbers.
//
// What breaks if this changes: S8, in max_grid, `queues` and `early`: the blocks of all waiting kernels of a device
// must fit on it together. packet_tokens and summed_tail are agreed on by all ranks at creation (host/creation.cc). The
// rest is speed alone.
#include "cuda/plan/budget.h"

#include <algorithm>

namespace tw::cuda {
namespace {

// Gives the blocks of a kernel that waits, all of them; `sm_limit`: 0 for none.
int blocks_under(const Budget& budget, int sm_limit) {
  return sm_limit > 0 ? std::min(sm_limit, budget.room) : budget.room;
}

// Decides how many blocks kernels have under a limit; the rest of the budget stands already.
void limit_blocks(int sm_limit, Budget* budget) {
  Budget& b = *budget;
  const int blocks = blocks_under(b, sm_limit);
  b.max_grid = blocks;
  if (b.loads_block != LoadsBlock::kNone) {
    const bool apart = blocks > kLoadsBlocks;  // blocks of each dispatch gather load statistics
    b.loads_block = apart ? LoadsBlock::kApart : LoadsBlock::kLast;
    if (apart) b.max_grid = blocks - kLoadsBlocks;
  }
  // A view that comes early holds SMs while the dispatch before it waits for peers, which an sm_limit leaves to
  // somebody else.
  b.early_views = b.early && sm_limit == 0;
  b.view_grid = sm_limit > 0 ? std::min(sm_limit, b.device_sms) : 2 * b.device_sms;
}

}  // namespace

Status make_budget(const Device& device, const Shape& shape, int sm_limit, int sharing, bool staged, Budget* budget) {
  Budget b;
  b.tuning = &tuning_of(device.sms, shape.ranks);
  const int queues = sharing * shape.channels;
  b.device_sms = device.sms;
  b.room = std::clamp(device.sms / queues, 1, kMaxBlocks);
  // A kernel with few SMs sends more than a round of rows sooner as Simple rows, in wide tiles, than as packets.
  const bool few = blocks_under(b, sm_limit) < b.device_sms / 2;
  const int32_t packets = std::max(shape.packet_tokens, shape.low_latency_packets);
  b.packet_tokens = few ? std::min(packets, kRound) : packets;
  b.summed_tail = tail_of(*b.tuning, shape, b.tuning->combine_tail, few);
  b.loads_block = shape.counts_loads != 0 ? LoadsBlock::kApart : LoadsBlock::kNone;
  b.early = queues == 1 && device.major >= 9 && !staged;  // where staged, a collective may come before
  limit_blocks(sm_limit, &b);
  *budget = b;
  if (queues <= device.sms) return {};
  return fail(twInvalidArgument,
              "{} is {}; {} ranks share a device of {} SMs, and a block of each lane of each must find room there, so "
              "lanes must be from {} to {}",
              Argument("config.lanes"), Value(shape.channels), sharing, device.sms, Least(1),
              Most(device.sms / sharing));
}

Budget limited(const Budget& group, int sm_limit) {
  Budget b = group;
  if (sm_limit > 0) limit_blocks(sm_limit, &b);
  return b;
}

Budget for_rows(const Budget& budget, const Shape& rows) {
  Budget b = budget;
  b.packet_tokens = std::min(b.packet_tokens, rows.packet_tokens);
  return b;
}

Roles roles_of(const Budget& budget, int64_t rows, const Tiles& tiles, bool both, int most) {
  const int64_t shares = rows * tiles.per_row.divisor;
  const int grid = budget.max_grid;
  if (!both || grid == 1) return Roles::one(static_cast<int>(std::clamp<int64_t>(shares, 1, grid)));
  const int sending = static_cast<int>(std::clamp<int64_t>(shares, 1, std::max(1, most)));
  return Roles::two(sending, static_cast<int>(std::clamp<int64_t>(shares, 1, grid - sending)));
}

Roles packet_roles(const Budget& budget, int64_t rows, const Tiles& tiles, bool both, int sends, int busy) {
  const int grid = budget.max_grid;
  if (!both || grid == 1) return roles_of(budget, rows, tiles, both, grid);
  const int64_t shares = rows * tiles.per_row.divisor;
  const int half = grid / 2;
  const int quarter = std::max(1, grid / 4);
  if (shares > int64_t{half} * kWarps) {
    const int sending = std::max(1, std::min(half, budget.device_sms * sends / 100));
    return Roles::two(sending, grid - sending);
  }
  const int eighth = std::min(quarter, std::max(1, budget.device_sms / 8));
  const int most = shares <= int64_t{eighth} * busy ? eighth : shares <= int64_t{quarter} * kWarps ? quarter : half;
  const auto blocks = static_cast<int>(std::clamp<int64_t>(shares, 1, most));
  return Roles::two(blocks, blocks);
}

int simple_senders(const Budget& budget, int sends, int at_most) {
  const int grid = budget.max_grid;
  return std::max({1, grid * sends / 100, std::min(budget.device_sms * sends, grid * at_most) / 100});
}

bool all_packets(const Budget& budget, const Shape& shape, int32_t bound) {
  return !shape.exact() && shape.ranks > 1 && shape.ranks <= kRanksAtOnce && bound > 0 &&
         bound <= std::min(budget.packet_tokens, kMostPackets);
}

int tail_of(const Tuning& tuning, const Shape& shape, int all, bool few) {
  return few ? tuning.least_tail : std::max(tuning.least_tail, all / std::max(1, shape.ranks - 1));
}

Kind kind_of(const Budget& budget, bool usual, bool packets) {
  if (packets) return Kind::kPackets;
  if (!usual) return Kind::kGeneric;
  return budget.low_sm() ? Kind::kLowSm : Kind::kUsual;
}

}  // namespace tw::cuda
