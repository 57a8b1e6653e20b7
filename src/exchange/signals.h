// The signal: 64 bits that a rank publishes to each peer when its rows of a step are written (docs/PROTOCOL.md).
// This file packs and unpacks signals and abort signals, and compares steps.
//
//   step:32 | mode:4 | n:28
//
// It is one aligned 64-bit store, so step, mode and n appear together. The step is the high half: on little-endian
// machines it is the 32-bit integer at signal + 4, which a futex can sleep on. All ranks must have one format. bank_of
// is S1; reached() is right only while ranks are close together, which S2 sees to.
#pragma once

#include <bit>
#include <cstdint>

namespace tw {

static_assert(std::endian::native == std::endian::little, "the step half of a signal is its second half");

enum class Mode : uint32_t {
  kNone = 0,             // as a window is born
  kDispatch = 1,         // n rows lie in the slots of (source, bank)
  kCombine = 2,          // n partials lie in the inbox of the bank
  kRefused = 3,          // the source was given bad arguments: no rows, the call fails everywhere
  kDispatchPackets = 4,  // n rows are on their way, the last of them as LL128 packets, which certify themselves
  kSkip = 5,             // no rows: a step that only moves a channel to its other bank
  kCounts = 6,           // no rows, but how many will come (exchange/counts.h)
  kGather = 7,           // n rows of the source lie in its places of the bank (layout/collective_map.h)
  kReduce = 8,           // likewise n partials of the source
  kDispatchRows = 9,     // as kDispatchPackets, but the metadata of Simple rows came in an earlier dispatch
};

inline constexpr uint32_t kMaxCount = (1u << 28) - 1;
inline constexpr uint64_t kStepHalf = 4;  // byte offset in the signal

struct Signal {
  uint32_t step = 0;
  Mode mode = Mode::kNone;
  uint32_t n = 0;

  friend constexpr bool operator==(const Signal&, const Signal&) = default;
};

constexpr uint64_t pack(Signal signal) {
  return static_cast<uint64_t>(signal.step) << 32 | static_cast<uint64_t>(signal.mode) << 28 | (signal.n & kMaxCount);
}

constexpr Signal unpack(uint64_t bits) {
  return {static_cast<uint32_t>(bits >> 32), static_cast<Mode>(bits >> 28 & 0xf),
          static_cast<uint32_t>(bits) & kMaxCount};
}

// Whether a signal's step has come as far as `step`. Steps wrap at 2^32: a step is before another if the way forward to
// it is the shorter one. That holds as long as ranks are less than 2^31 steps apart; S2 keeps them within one.
constexpr bool reached(uint32_t seen, uint32_t step) { return static_cast<int32_t>(seen - step) >= 0; }

// S1: a step's bank. 2^32 is even, so the two banks alternate across the wrap too.
constexpr int bank_of(uint32_t step) { return static_cast<int>(step & 1); }

// The place of a step: its channel and number, which name the bank.
struct StepPlace {
  int32_t channel = 0;
  uint32_t step = 0;

  constexpr int bank() const { return bank_of(step); }
};

// An abort signal says why its writer gave the group up: went_on:1 | left:1 | kind:8 | reporter:16 | culprit:16; 0: it
// did not. The reporter is the rank that found out first, so that the others do not blame each other. The two bits are
// for ranks that shrink the group, and may stand without a kind, where nothing is wrong.
struct AbortSignal {
  uint32_t kind = 0;  // twResult_t
  uint32_t reporter = 0;
  uint32_t culprit = 0;
  bool left = false;     // the writer will not shrink the group
  bool went_on = false;  // it has shrunk the group, and is in the new one
};

constexpr uint64_t pack(AbortSignal signal) {
  return static_cast<uint64_t>(signal.went_on) << 41 | static_cast<uint64_t>(signal.left) << 40 |
         static_cast<uint64_t>(signal.kind & 0xff) << 32 | static_cast<uint64_t>(signal.reporter & 0xffff) << 16 |
         (signal.culprit & 0xffff);
}

constexpr AbortSignal unpack_abort(uint64_t bits) {
  return {static_cast<uint32_t>(bits >> 32 & 0xff), static_cast<uint32_t>(bits >> 16 & 0xffff),
          static_cast<uint32_t>(bits & 0xffff), (bits >> 40 & 1) != 0, (bits >> 41 & 1) != 0};
}

}  // namespace tw
