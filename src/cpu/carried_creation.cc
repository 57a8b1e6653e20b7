// How a group's ranks come together over a carrier.
#include <sys/mman.h>

#include <algorithm>

#include "bootstrap/shared_memory.h"
#include "core/channel.h"
#include "cpu/carried.h"

namespace tw::cpu {
namespace {

// Meetings, as offsets from the tag; the first two are those of posts.
enum Stage : uint64_t { kOfferStage = 2, kCostsStage };

}  // namespace

Status CarriedTransport::make(const BackendInit& init, std::unique_ptr<CarriedTransport>* made) {
  std::unique_ptr<CarriedTransport> transport(new CarriedTransport(init));
  TW_RETURN_IF_FAILED(transport->open(init));
  TW_RETURN_IF_FAILED(transport->measure(init));
  *made = std::move(transport);
  return {};
}

Status CarriedTransport::open(const BackendInit& init) {
  // The window first: a rank that has no memory for it must not leave the others waiting in a connection.
  void* const memory = ::mmap(nullptr, map_.bytes(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  const bool mapped = memory != MAP_FAILED;
  if (mapped) {
    window_ = std::make_shared<Mapping>(static_cast<std::byte*>(memory), map_.bytes());
    prepare_words(map_, context_.first_step, window_->data());
  }
  const Status ready =
      mapped ? Status{} : fail(twOutOfMemory, "cannot map a window of %s", bytes_text(map_.bytes()).c_str());
  return open_channel(init, init.tag + kOfferStage, -1, ready, &channel_);
}

// Microseconds of a move with so many bytes to each rank, the least of a few, as what disturbs them only adds; less
// than 0 if one fails.
double CarriedTransport::time_moves(twMoveKind_t kind, uint64_t bytes, int rounds, TimePoint deadline) {
  Buffer from;
  Buffer to;
  from.resize(bytes * static_cast<uint64_t>(ranks_));
  to.resize(bytes * static_cast<uint64_t>(ranks_));
  std::vector<double> times;
  for (int round = -1; round < rounds; ++round) {  // the first one connects
    const TimePoint begin = std::chrono::steady_clock::now();
    const int64_t move = start(0, kind, from.data(), to.data(), &bytes, &bytes);
    const int ended =
        move < 0 ? -1 : carrier_->calls.wait(carrier_->calls.context, channel_, move, milliseconds_to(deadline));
    if (ended != 1) {
      stuck_ |= ended == 0;
      from.leak(), to.leak();
      return -1;
    }
    const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - begin;
    if (round >= 0) times.push_back(took.count());
  }
  return *std::min_element(times.begin(), times.end());
}

Status CarriedTransport::measure(const BackendInit& init) {
  constexpr int kSmallRounds = 15;
  constexpr int kLargeRounds = 5;
  constexpr uint64_t kLarge = 1 << 20;  // that a rank sends
  Costs& costs = carrier_->costs;
  if (ranks_ > 1 && !carrier_->measured) {
    const uint64_t each = kLarge / static_cast<uint64_t>(ranks_ - 1);
    double us[2];
    double rate[2];
    for (const twMoveKind_t kind : {twMoveBlocks, twMoveGather}) {
      const int i = kind == twMoveBlocks ? 0 : 1;
      us[i] = time_moves(kind, sizeof(Frame), kSmallRounds, init.deadline);
      const double large = us[i] < 0 ? -1 : time_moves(kind, each, kLargeRounds, init.deadline);
      if (large < 0) return fail(twSystemError, "%s: a move among %d ranks failed", kConnecting, ranks_);
      // Ranks that were late for the small moves must not make the large ones seem to take nothing.
      rate[i] = static_cast<double>(kLarge) / std::max(large - us[i], large / 4);
    }
    const Costs mine{us[0], rate[0], us[1], rate[1]};
    std::vector<Parcel> all;
    TW_RETURN_IF_FAILED(gather(*bootstrap_, members_, init.tag + kCostsStage, {Packer().add(mine).take(), {}},
                               init.deadline, kConnecting, &all));
    costs = mine;
    for (const Parcel& parcel : all) {
      const auto theirs = Unpacker(parcel.bytes).get<Costs>();
      costs.exchange_us = std::max(costs.exchange_us, theirs.exchange_us);
      costs.exchange_rate = std::min(costs.exchange_rate, theirs.exchange_rate);
      costs.gather_us = std::max(costs.gather_us, theirs.gather_us);
      costs.gather_rate = std::min(costs.gather_rate, theirs.gather_rate);
    }
    carrier_->measured = true;
  }
  const auto longest = longest_message(map_.shape());
  inline_bytes_ = carrier_->inline_bytes < 0
                      ? choose_inline_bytes(map_.shape(), costs)
                      : std::min<uint64_t>(longest, static_cast<uint64_t>(carrier_->inline_bytes));
  inline_bytes_ = (inline_bytes_ + 63) / 64 * 64;
  return {};
}

}  // namespace tw::cpu
