// Creates staged transport for a group: maps this rank's window, connects over the carrier (core/carrier_channel.h),
// and, for the comm's first group, times moves. It gives inline_bytes, the size of blocks, and the costs that
// cost_model.h decides by; both must come out the same on all ranks, as they make the same moves by them. The number of
// rounds is agreed in the moves themselves.
#include <algorithm>

#include "bootstrap/shared_memory.h"
#include "core/carrier_channel.h"
#include "core/interrupt.h"
#include "cpu/staged.h"

namespace tw::cpu {
namespace {

// Meetings, as offsets from the tag; the first two offsets are those of posts.
enum Stage : uint64_t { kOfferStage = 2, kCostsStage = kOfferStage + 2 };

constexpr int kFewestRounds = 4;
constexpr int kMostRounds = 20;
constexpr double kMeasureUs = 220e3;  // no round begins after that

double microseconds_since(TimePoint begin) {
  return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin).count();
}

}  // namespace

Status StagedTransport::make(const BackendInit& init, std::shared_ptr<StagedTransport>* made) {
  std::shared_ptr<StagedTransport> transport(new StagedTransport(init));
  TW_RETURN_IF_FAILED(transport->open(init));
  TW_RETURN_IF_FAILED(transport->measure(init));
  *made = std::move(transport);
  return {};
}

Status StagedTransport::open(const BackendInit& init) {
  // The window comes first: a rank that has no memory for it must not leave the others waiting in a connection.
  Status ready = Mapping::reserve(map_.bytes(), true, &window_);
  if (ready.ok()) ready = window_->map(-1, 0, map_.bytes());
  if (ready.ok()) prepare_signals(map_, first_step_, window_->data());
  return open_carrier_channel(init, init.tag + kOfferStage, -1, ready, &carrier_channel_);
}

// Times a move: microseconds that it takes here with so many bytes to each rank; less than 0 if it fails, or is given
// up.
double StagedTransport::time_move(twMoveKind_t kind, uint64_t bytes, Buffer& from, Buffer& to, TimePoint deadline,
                                  const CarrierMeeting& meeting) {
  const TimePoint begin = std::chrono::steady_clock::now();
  const int64_t move = start(0, kind, from.data(), to.data(), &bytes, &bytes);
  int ended = move < 0 ? -1 : 0;
  while (ended == 0 && !is_interrupted()) {
    const TimePoint look = std::min(deadline, std::chrono::steady_clock::now() + kLook);
    ended = carrier_->calls.wait(carrier_->calls.context, carrier_channel_, move, milliseconds_to(look));
    if (ended == 0 && (std::chrono::steady_clock::now() >= deadline || meeting.over())) break;
  }
  stuck_ |= ended == 0;
  return ended == 1 ? microseconds_since(begin) : -1;
}

// Times this rank's rounds. All ranks make as many: each says in a round's first move how long it has measured.
Status StagedTransport::measure_moves(const BackendInit& init, const CarrierMeeting& meeting,
                                      std::vector<TimedRound>* rounds) {
  const auto n = static_cast<uint64_t>(ranks_);
  const uint64_t each = std::max(kLargeMove / (n - 1), sizeof(Frame));
  Buffer from;
  Buffer to;
  from.resize(each * n);
  to.resize(each * n);
  const TimePoint began = std::chrono::steady_clock::now();
  for (int round = -1; round < kMostRounds; ++round) {  // the first one connects
    double longest = microseconds_since(began);
    for (uint64_t peer = 0; peer < n; ++peer) std::memcpy(from.data() + peer * sizeof(Frame), &longest, sizeof longest);
    TimedRound timed;
    for (size_t i = 0; i < timed.size(); ++i) {
      const TimedMove& move = kTimedMoves[i];
      timed[i] = time_move(move.kind, move.large ? each : sizeof(Frame), from, to, init.deadline, meeting);
      if (timed[i] < 0) {
        from.leak(), to.leak();
        if (was_interrupted()) {
          return fail(twInterrupted, "{} was interrupted in a move among {} ranks", kConnecting, ranks_);
        }
        return fail(stuck_ ? twTimeout : twSystemError, "{}: a move among {} ranks {}", kConnecting, ranks_,
                    stuck_ ? "has not ended in time" : "failed");
      }
      for (uint64_t peer = 0; i == 0 && peer < n; ++peer) {
        double theirs = 0;
        std::memcpy(&theirs, to.data() + peer * sizeof(Frame), sizeof theirs);
        longest = std::max(longest, theirs);
      }
      if (round >= kFewestRounds && longest >= kMeasureUs) return {};
    }
    if (round >= 0) rounds->push_back(timed);
  }
  return {};
}

Status StagedTransport::measure(const BackendInit& init) {
  if (ranks_ > 1 && !carrier_->measured) {
    const CarrierMeeting meeting(init, init.tag + kCostsStage);
    std::vector<TimedRound> mine;
    const Status measured = measure_moves(init, meeting, &mine);
    Packer packer;
    for (const TimedRound& round : mine) packer.add(round);
    std::vector<std::string> all;
    TW_RETURN_IF_FAILED(meeting.meet(measured, packer.take(), &all));
    std::vector<std::vector<TimedRound>> rounds;
    for (const std::string& bytes : all) {
      Unpacker unpacker(bytes);
      for (TimedRound& round : rounds.emplace_back(mine.size())) round = unpacker.get<TimedRound>();
    }
    carrier_->costs = costs_of(rounds);
    carrier_->measured = true;
  }
  choose_blocks();
  return {};
}

void StagedTransport::choose_blocks() {
  const auto longest = longest_message(map_.shape());
  inline_bytes_ = carrier_->inline_bytes < 0
                      ? choose_inline_bytes(map_.shape(), carrier_->costs)
                      : std::min<uint64_t>(longest, static_cast<uint64_t>(carrier_->inline_bytes));
  inline_bytes_ = (inline_bytes_ + 63) / 64 * 64;
}

}  // namespace tw::cpu
