// The cost model of staged transport: how long a dispatch takes by each strategy, and how much of a message goes into
// the first move. It takes times that were measured once per comm, what all ranks have in common, and the bound of the
// call. So all ranks decide alike without asking each other. A number here changes speed alone, as long as it is the
// same on all ranks; an input that differs between ranks lets them make different moves, and they wait for each other.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <iterator>
#include <vector>

#include "core/carrier.h"
#include "layout/window_map.h"

namespace tw::cpu {

// Bytes that a rank sends in a large move, to all peers together.
inline constexpr uint64_t kLargeMove = 1 << 20;

// The moves that are timed in turns when a comm's first group is created, so that what disturbs one disturbs the
// others.
struct TimedMove {
  twMoveKind_t kind;
  bool large;
};
inline constexpr TimedMove kTimedMoves[] = {
    {twMoveBlocks, false}, {twMoveBlocks, false}, {twMoveBlocks, false}, {twMoveBlocks, false},
    {twMoveBlocks, true},  {twMoveGather, false}, {twMoveGather, false}, {twMoveGather, true},
};
using TimedRound = std::array<double, std::size(kTimedMoves)>;  // microseconds on one rank

// Computes the costs of moves from the rounds of each rank. All ranks have made as many, and the result is the same on
// all ranks that have the same rounds.
//
// A rank that comes late to a move waits less than the others, so the ranks' mean is taken: the sum of these means is
// the time that has passed. For each kind of move the result is the lowest decile of the means, as disturbances only
// add time. A quartile or a median says as much about who else has used the cores at that moment: with a compiler
// beside two ranks they were 2 and 3.7 ms, on a quiet machine 0.2 to 0.3. A group would then believe for ever that
// bytes cost nothing beside moves. The least is the time of a move for which everything was there already, and differs
// from one time to the next. For the same reasons no more than a third of a large move's time counts as its beginning.
inline Costs costs_of(const std::vector<std::vector<TimedRound>>& ranks) {
  const auto typical = [&](twMoveKind_t kind, bool large) {
    std::vector<double> means;
    for (size_t round = 0; round < ranks[0].size(); ++round) {
      for (size_t i = 0; i < std::size(kTimedMoves); ++i) {
        if (kTimedMoves[i].kind != kind || kTimedMoves[i].large != large) continue;
        double sum = 0;
        for (const std::vector<TimedRound>& rounds : ranks) sum += rounds[round][i];
        means.push_back(sum / static_cast<double>(ranks.size()));
      }
    }
    const auto decile = means.begin() + static_cast<std::ptrdiff_t>(means.size() / 10);
    std::nth_element(means.begin(), decile, means.end());
    return *decile;
  };
  const auto rate = [&](twMoveKind_t kind, double begin) {
    const double large = typical(kind, true);
    return static_cast<double>(kLargeMove) / std::max(large - begin, large * 2 / 3);
  };
  const double exchange = typical(twMoveBlocks, false);
  const double gather = typical(twMoveGather, false);
  return {exchange, rate(twMoveBlocks, exchange), gather, rate(twMoveGather, gather)};
}

// The header before each part of a message: 16 bytes that say where the part goes.
inline constexpr uint64_t kPutHeader = 16;

// Bytes of a routed dispatch's row, with metadata.
constexpr uint64_t routed_row_bytes(const Shape& shape) {
  return shape.dispatch_bytes() + meta_bytes(shape.top_k) + kPutHeader * (1 + shape.payloads);
}

// Bytes of a gathered dispatch's row: payloads, ids and weights.
constexpr uint64_t gathered_row_bytes(const Shape& shape) {
  return shape.dispatch_bytes() + meta_bytes(shape.top_k) - sizeof(RowHeader);
}

// Bytes that a combine returns for a row, with values of its choices where they fit: of one row, or per expert of K.
constexpr uint64_t combined_row_bytes(const Shape& shape) {
  const auto top_k = static_cast<uint64_t>(shape.top_k);
  const uint64_t values = sizeof(float) * top_k;
  const bool valued = shape.combine_room >= shape.combine_bytes + values;
  if (shape.per_expert != 0) {
    return top_k * (shape.combine_bytes + kPutHeader + (valued ? sizeof(float) + kPutHeader : 0));
  }
  return shape.combine_bytes + kPutHeader + (valued ? values + kPutHeader : 0);
}

// Bytes of a dispatch's message that tell what its rank has sent to each expert.
constexpr uint64_t told_loads_bytes(const Shape& shape) {
  return shape.counts_loads == 0 ? 0 : kPutHeader + sizeof(uint64_t) * WindowMap::loads_words(shape);
}

// The longest message of any step of a group.
constexpr uint64_t longest_message(const Shape& shape) {
  const auto tokens = static_cast<uint64_t>(shape.max_tokens);
  const uint64_t dispatched =
      std::max(routed_row_bytes(shape), gathered_row_bytes(shape)) * tokens + told_loads_bytes(shape);
  const uint64_t counts = shape.exact() ? kPutHeader + WindowMap::counts_bytes(shape) : 0;
  return std::max({dispatched, combined_row_bytes(shape) * tokens, counts});
}

// Chooses how many bytes of each message travel with its frame, in the first move of a step.
//
// They are the whole longest message, if that takes no longer than a second move takes to begin: then one move is never
// slower than asking for the sizes first, however few bytes there are. Otherwise they are, to all peers together, what
// takes two thirds of that time. A step whose messages fit is one move. If they are longer, the second move has only
// the rest, so blocks cost such a step only what shorter messages leave empty beside longer ones. That is less than
// half of the blocks where experts are drawn evenly: a third of the time that a move takes to begin, of which the step
// takes two and more.
inline uint64_t choose_inline_bytes(const Shape& shape, const Costs& costs) {
  const double peers = std::max(1, shape.ranks - 1);
  const auto longest = static_cast<double>(longest_message(shape));
  const double begin = costs.exchange_us * costs.exchange_rate;  // bytes that a rank could have sent in that time
  if (longest * peers <= begin) return longest_message(shape);
  return static_cast<uint64_t>(std::clamp(begin * 2 / 3 / peers, 0.0, longest));
}

// The share of a rank's tokens that go to another given rank, if experts were drawn evenly and ranks held equally many.
inline double share_of_rank(const Shape& shape) { return 1 - std::pow(1 - 1.0 / shape.ranks, shape.top_k); }

// Microseconds of a dispatch whose ranks have `bound` tokens each.
inline double dispatch_us(const Shape& shape, const Costs& costs, uint64_t inline_bytes, int bound, bool gathered) {
  const double peers = shape.ranks - 1;
  const double message = gathered ? static_cast<double>(bound) * static_cast<double>(gathered_row_bytes(shape))
                                  : bound * share_of_rank(shape) * static_cast<double>(routed_row_bytes(shape));
  const double blocks = costs.exchange_us + peers * static_cast<double>(inline_bytes) / costs.exchange_rate;
  if (message <= static_cast<double>(inline_bytes)) return blocks;
  const double start = gathered ? costs.gather_us : costs.exchange_us;
  const double rest = message - static_cast<double>(inline_bytes);
  return blocks + start + peers * rest / (gathered ? costs.gather_rate : costs.exchange_rate);
}

inline bool choose_gathered(const Shape& shape, const Costs& costs, twStrategy_t strategy, uint64_t inline_bytes,
                            int bound) {
  if (strategy != twAuto) return strategy == twGathered;
  // Routed where it is close: that sends fewer bytes, and measurements are not exact.
  constexpr double kClearly = 0.8;
  return dispatch_us(shape, costs, inline_bytes, bound, true) <
         kClearly * dispatch_us(shape, costs, inline_bytes, bound, false);
}

}  // namespace tw::cpu
