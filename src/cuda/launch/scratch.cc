// Places of a block's working arrays in shared memory, for dispatches, combines and collectives.
//
// Each make() takes the group's shape and gives offsets that do not overlap, aligned to 8 bytes, and the total in
// `bytes`. Pure: the same shape gives the same offsets. The host calls it once per group; kernels find the result among
// their parameters.
//
// What breaks if this changes: `rounds` must be a power of two (device/routing.cuh masks with it), and `bytes` must fit
// into an SM's shared memory for every shape; the order of arrays is free. Results keep their bits with any of it.
#include "cuda/launch/collective.h"
#include "cuda/launch/combine.h"
#include "cuda/launch/dispatch.h"

namespace tw::cuda {
namespace {

// Gives out shared memory, aligned to 8 bytes.
class Carver {
 public:
  template <class T>
  uint32_t take(int64_t count) {
    const uint32_t begin = at_;
    at_ = static_cast<uint32_t>((at_ + sizeof(T) * static_cast<uint64_t>(count) + 7) / 8 * 8);
    return begin;
  }
  uint32_t bytes() const { return at_; }

 private:
  uint32_t at_ = 0;
};

constexpr uint32_t kMostMasks = 8192;  // most words of marks where more than two rounds are remembered

}  // namespace

DispatchScratch DispatchScratch::make(const Shape& shape) {
  Carver carver;
  DispatchScratch at{};
  at.windows = carver.take<std::byte*>(shape.ranks);
  at.here = carver.take<int32_t>(shape.ranks);
  at.there = carver.take<int32_t>(shape.ranks);
  at.limit = carver.take<int32_t>(shape.ranks);
  at.rounds = 2;
  while (at.rounds < kMostRounds && at.rounds * kRound < static_cast<uint32_t>(shape.max_tokens) &&
         2 * at.rounds * kWarps * static_cast<uint32_t>(shape.ranks) <= kMostMasks) {
    at.rounds *= 2;
  }
  at.going = carver.take<uint32_t>(int64_t{at.rounds} * kWarps * shape.ranks);
  at.base = carver.take<int32_t>(int64_t{2} * at.rounds * shape.ranks);
  at.routed = carver.take<int32_t>(1);
  at.progress = carver.take<int32_t>(kWarps);
  at.meta = carver.take<uint64_t>(int64_t{kWarps} * (1 + shape.top_k));
  at.before_packets = carver.take<int32_t>(shape.ranks);
  at.plain = carver.take<uint32_t>(1);
  at.source_error = carver.take<int32_t>(shape.ranks);
  at.failed = carver.take<int32_t>(1);
  at.table = carver.take<uint32_t>(fits_tables(shape) ? shape.experts + 1 : 0);
  at.map = carver.take<uint32_t>(fits_tables(shape) ? MapWords::used(shape) : 0);
  at.bytes = carver.bytes();
  return at;
}

CombineScratch CombineScratch::make(const Shape& shape) {
  Carver carver;
  CombineScratch at{};
  constexpr int64_t kSets = kWarps;
  at.windows = carver.take<std::byte*>(shape.ranks);
  at.rows = carver.take<const std::byte*>(kSets * shape.top_k);
  at.places = carver.take<const std::byte*>(kSets * shape.fan_out());
  at.from = carver.take<Destination>(kSets * shape.fan_out());
  at.weights = carver.take<float>(kSets * shape.top_k);
  at.kinds = carver.take<int32_t>(kSets * shape.fan_out());
  at.row_counts = carver.take<int32_t>(kSets);
  at.first = carver.take<int32_t>(shape.ranks);
  at.counts = carver.take<int32_t>(shape.ranks);
  at.sent_rows = carver.take<int32_t>(2 * shape.ranks);
  at.given = carver.take<uint64_t>(kChunks);
  at.sent = carver.take<uint64_t>(kChunks);
  at.taken = carver.take<int32_t>(kChunks);
  at.failed = carver.take<int32_t>(1);
  at.bytes = carver.bytes();
  return at;
}

CollectiveScratch CollectiveScratch::make(const Shape& shape) {
  Carver carver;
  CollectiveScratch at{};
  at.windows = carver.take<std::byte*>(shape.ranks);
  at.sizes = carver.take<int32_t>(shape.ranks);
  at.first = carver.take<int32_t>(shape.ranks + 1);
  at.came = carver.take<int32_t>(shape.ranks);
  at.failed = carver.take<int32_t>(1);
  at.given = carver.take<uint64_t>(kChunks);
  at.sent = carver.take<uint64_t>(kChunks);
  at.taken = carver.take<int32_t>(kChunks);
  at.bytes = carver.bytes();
  return at;
}

}  // namespace tw::cuda
