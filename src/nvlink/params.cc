#include "nvlink/params.h"

namespace tw::nvlink {
namespace {

// Gives out shared memory, 8 bytes aligned.
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

constexpr int kWarpsOfBlock = kThreads / 32;

}  // namespace

DispatchScratch DispatchScratch::make(const Shape& shape) {
  Carver carver;
  DispatchScratch at{};
  at.windows = carver.take<std::byte*>(shape.ranks);
  at.destinations = carver.take<Destination>(static_cast<int64_t>(kBatch) * shape.fan_out());
  at.meta = carver.take<uint64_t>(static_cast<int64_t>(kBatch) * (1 + shape.top_k));
  at.next = carver.take<int32_t>(shape.ranks);
  at.fan = carver.take<int32_t>(kBatch);
  at.in_warp = carver.take<int32_t>(kWarpsOfBlock *
                                    static_cast<int64_t>(shape.ranks < kRanksAtOnce ? shape.ranks : kRanksAtOnce));
  at.source_n = carver.take<int32_t>(shape.ranks);
  at.source_mode = carver.take<int32_t>(shape.ranks);
  at.table = carver.take<uint32_t>(shape.experts <= kMaxTable ? shape.experts : 0);
  at.bytes = carver.bytes();
  return at;
}

CombineScratch CombineScratch::make(const Shape& shape, bool bulk) {
  Carver carver;
  CombineScratch at{};
  const int64_t sets = bulk ? kWarpsOfBlock : 1;
  at.windows = carver.take<std::byte*>(shape.ranks);
  at.rows = carver.take<const std::byte*>(sets * shape.top_k);
  at.places = carver.take<const std::byte*>(sets * shape.fan_out());
  at.from = carver.take<Destination>(sets * shape.fan_out());
  at.weights = carver.take<float>(sets * shape.top_k);
  at.kinds = carver.take<int32_t>(sets * shape.fan_out());
  at.row_counts = carver.take<int32_t>(sets);
  at.fan = carver.take<int32_t>(sets);
  at.counts = carver.take<int32_t>(shape.ranks);
  at.sent = carver.take<int32_t>(kChunks);
  at.bytes = carver.bytes();
  return at;
}

}  // namespace tw::nvlink
