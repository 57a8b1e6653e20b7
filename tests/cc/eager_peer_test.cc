// The exchange against the fastest peers there can be. A transport in this thread answers each publish of a step by
// finishing that step at the peer and writing the peer's next step into our window, before the publish returns. All
// of a bank belongs to the next step from then on, so the first answer overwrites it whole. Code that reads a bank too
// late, publishes too early or chooses a wrong bank then gives another result, every time.
#include <gtest/gtest.h>

#include <sys/mman.h>

#include <cstring>
#include <functional>
#include <map>
#include <set>
#include <thread>
#include <vector>

#include "cpu/transport.h"
#include "cpu/vector.h"
#include "exchange/combine.h"
#include "exchange/counts.h"
#include "exchange/dispatch.h"
#include "reference.h"
#include "views/rank_major.h"

namespace tw {
namespace {

constexpr int kRanks = 3;
constexpr int kMe = 0;
constexpr int kElements = 4;
constexpr int kTokens = 2;  // of every rank
constexpr int kTopK = 2;
constexpr int kBound = 3;
constexpr uint64_t kRow = kElements * sizeof(float);
constexpr int32_t kRows = kRanks * kBound;
// With room for counts, and for as many rows as slots, so that one map serves every kind of step.
constexpr Shape kShape{kRanks, kRanks, kTopK, kBound, 1, 1, {kRow}, kRow, kRows, 1};

// Expert e lives on rank e. Our tokens go to ranks {1, 2} and {0, 2}; both tokens of a peer come to us.
constexpr int32_t kExpertRank[] = {0, 1, 2};
constexpr int32_t kExpertSlot[] = {0, 0, 0};
constexpr int32_t kOurIds[] = {2, 1, 0, 2};
constexpr int32_t kOurRows[] = {1, 1, 2};  // for each expert

float value(uint32_t step, int source, int row, int i) {
  return static_cast<float>(
      test::mix({step, static_cast<uint64_t>(source), static_cast<uint64_t>(row), static_cast<uint64_t>(i)}) & 0xffff);
}

// What a peer tells: rows for each rank, and last for our expert.
int32_t told(uint32_t step, int peer, int i) {
  return static_cast<int32_t>(test::mix({step, static_cast<uint64_t>(peer), static_cast<uint64_t>(i)}) & 0xff);
}

WindowMap make_map() {
  WindowMap map;
  WindowMap::make(kShape, &map);
  return map;
}

class EagerTransport {
 public:
  explicit EagerTransport(std::map<uint32_t, Mode> plan)
      : plan_(std::move(plan)), map_(make_map()), windows_(kRanks, std::vector<std::byte>(map_.bytes() + 64)) {}

  int rank() const { return kMe; }
  int ranks() const { return kRanks; }

  void put(int peer, uint64_t offset, const void* source, size_t n) {
    EXPECT_FALSE(told_.contains(peer)) << "S4: rows put after the signal that stands for them";
    const uint64_t begin = map_.inbox(0, static_cast<int>(step & 1), 0, 0);
    EXPECT_GE(offset, begin) << "S1: step " << step;
    EXPECT_LE(offset + n, begin + map_.inbox(0, 1, 0, 0) - map_.inbox(0, 0, 0, 0)) << "S1: step " << step;
    flushed_ = false;
    std::memcpy(local_of(peer, offset), source, n);
  }
  void put_row(int peer, uint64_t offset, const void* source, size_t n) { put(peer, offset, source, n); }
  void flush() { flushed_ = true; }
  void publish(int peer, uint64_t offset, Signal signal, uint64_t note) {
    EXPECT_TRUE(flushed_) << "S4: published before a flush";
    EXPECT_EQ(offset, map_.signal(0, static_cast<int>(step & 1), kMe)) << "S1: step " << step;
    EXPECT_EQ(signal.step, step);
    EXPECT_TRUE(told_.insert(peer).second) << "published twice";
    write_signal(peer, offset, signal, note);
    if (peer != kMe) answer(peer, signal.step + 1);
  }
  Signal load(uint64_t offset) const {
    uint64_t bits = 0;
    std::memcpy(&bits, windows_[kMe].data() + base() + offset, sizeof bits);
    return unpack(bits);
  }
  std::byte* local(uint64_t offset) { return local_of(kMe, offset); }
  const std::byte* returned(StepPlace, uint64_t offset) { return local(offset); }
  Wake wait(int, uint64_t offset, uint32_t at, TimePoint) {
    return reached(load(offset).step, at) ? Wake::kArrived : Wake::kLate;
  }

  // Begins our next step; the peers answered the one before.
  void begin(uint32_t next) {
    step = next;
    told_.clear();
    flushed_ = false;
  }
  const std::byte* at_peer(int peer, uint64_t offset) { return local_of(peer, offset); }
  const WindowMap& map() const { return map_; }
  // What a peer does when it has heard of the step before: its whole part of `next`, into our window.
  void answer(int peer, uint32_t next) {
    const auto planned = plan_.find(next);
    if (planned == plan_.end()) return;
    const StepPlace at{0, next};
    if (begun_.insert(next).second) {  // the bank is the next step's now
      const uint64_t bank = map_.inbox(0, 1, 0, 0) - map_.inbox(0, 0, 0, 0);
      std::memset(local(map_.inbox(0, at.bank(), 0, 0)), 0xee, bank);
    }
    const Mode mode = planned->second;
    const uint32_t n = mode == Mode::kCounts     ? send_told(peer, at)
                       : mode == Mode::kDispatch ? send_rows(peer, at)
                                                 : send_partials(peer, at);
    write_signal(kMe, map_.signal(0, at.bank(), peer), {next, mode, n}, mode == Mode::kCounts ? 0 : kBound);
  }

  uint32_t step = 0;

 private:
  size_t base() const { return 64 - reinterpret_cast<uintptr_t>(windows_[kMe].data()) % 64; }
  std::byte* local_of(int peer, uint64_t offset) {
    return windows_[peer].data() + (64 - reinterpret_cast<uintptr_t>(windows_[peer].data()) % 64) + offset;
  }
  void write_signal(int peer, uint64_t offset, Signal signal, uint64_t note) {
    const uint64_t bits = pack(signal);
    std::memcpy(local_of(peer, offset), &bits, sizeof bits);
    std::memcpy(local_of(peer, offset + kNoteOffset), &note, sizeof note);
  }
  // Any numbers: counts need not fit the rows of other steps.
  uint32_t send_told(int peer, StepPlace at) {
    for (int i = 0; i <= kRanks; ++i) {
      const int32_t rows = told(at.step, peer, i);
      std::memcpy(local(map_.counts(0, at.bank(), peer)) + i * sizeof rows, &rows, sizeof rows);
    }
    return 0;
  }
  uint32_t send_rows(int peer, StepPlace at) {
    for (int p = 0; p < kTokens; ++p) {
      struct {
        RowHeader header;
        int32_t ids[kTopK];
        float weights[kTopK];
      } meta{{p, 0}, {peer, 0}, {0.5f, 1.0f}};
      static_assert(sizeof meta == meta_bytes(kTopK));
      std::memcpy(local(map_.meta(0, at.bank(), peer, p, kBound)), &meta, sizeof meta);
      auto* const row = reinterpret_cast<float*>(local(map_.payload(0, at.bank(), 0, peer, p, kBound)));
      for (int i = 0; i < kElements; ++i) row[i] = value(at.step, peer, p, i);
    }
    return kTokens;
  }
  uint32_t send_partials(int peer, StepPlace at) {
    const int position[kTokens] = {peer - 1, 1};  // of the peer among our tokens' ranks
    const int first = peer == 1 ? 1 : kTokens;    // rank 1 holds token 0 only
    for (int token = 0; token < first; ++token) {
      auto* const row = reinterpret_cast<float*>(local(map_.inbox(0, at.bank(), token, position[token])));
      for (int i = 0; i < kElements; ++i) row[i] = value(at.step, peer, token, i);
    }
    return static_cast<uint32_t>(first);
  }

  std::map<uint32_t, Mode> plan_;
  WindowMap map_;
  std::vector<std::vector<std::byte>> windows_;
  std::set<int> told_;
  std::set<uint32_t> begun_;
  bool flushed_ = false;
};
static_assert(Transport<EagerTransport>);

// Our rank, driving the library's templates as a backend does.
class Rank {
 public:
  explicit Rank(EagerTransport& t) : t_(t), ids_(kOurIds, kOurIds + 4), meta_(kRanks * kBound * meta_bytes(kTopK)) {
    routing_ = {kTokens, ids_.data(), weights_, first_, destinations_, send_counts_};
    assign_slots(kShape, {kExpertRank, kExpertSlot}, &routing_);
    received_ = {counts_, meta_.data()};
  }

  void dispatch(uint32_t step) {
    float rows[kTokens][kElements];
    for (int token = 0; token < kTokens; ++token) {
      for (int i = 0; i < kElements; ++i) rows[token][i] = value(step, kMe, token, i);
    }
    const RowsIn in{reinterpret_cast<const std::byte*>(rows), sizeof rows[0]};
    t_.begin(step);
    send_dispatch(t_, t_.map(), {0, step}, routing_, &in, kBound, nullptr,
                  [&](int) { return int64_t{t_.rank()} * kBound; });
    const StepEnd end = await_step(t_, t_.map(), {0, step}, Mode::kDispatch, kBound, {}, counts_);
    ASSERT_EQ(end.code, twSuccess) << "step " << step << ", peer " << end.peer << " at step " << end.seen.step;
    ASSERT_TRUE(
        take_meta(t_, t_.map(), {0, step}, kBound, &received_, [](int source) { return int64_t{source} * kBound; }));
    ASSERT_EQ(counts_[0], 1);
    ASSERT_EQ(counts_[1], kTokens);
    ASSERT_EQ(counts_[2], kTokens);
    dispatched_ = step;
    for (int source = 0; source < kRanks; ++source) {
      for (int p = 0; p < counts_[source]; ++p) expect_row(view(source, p), source, p);
    }
  }

  void exchange_counts(uint32_t step) {
    const StepPlace at{0, step};
    t_.begin(step);
    send_counts(t_, t_.map(), at, {kExpertRank, kExpertSlot}, routing_, nullptr, 0);
    for (int peer = 0; peer < kRanks; ++peer) {
      int32_t ours[kRanks + 1];
      std::memcpy(ours, t_.at_peer(peer, t_.map().counts(0, at.bank(), kMe)), sizeof ours);
      const int32_t want[] = {1, 1, 2, kOurRows[peer]};
      for (int i = 0; i <= kRanks; ++i) ASSERT_EQ(ours[i], want[i]) << "step " << step << ", rank " << peer;
    }
    int32_t none[kRanks];
    const StepEnd end = await_step(t_, t_.map(), at, Mode::kCounts, 0, {}, none);
    ASSERT_EQ(end.code, twSuccess) << "step " << step << ", peer " << end.peer << " at step " << end.seen.step;
    int32_t sent[kRanks * kRanks], experts[1];
    int64_t begin[kRanks], source[kRanks + 1];
    Counts counts{sent, experts, begin, source};
    take_counts(t_, t_.map(), at, 1, INT32_MAX, false, &counts);
    for (int to = 0; to < kRanks; ++to) {
      for (const int peer : {1, 2}) ASSERT_EQ(counts.at(kShape, peer, to), told(step, peer, to)) << "step " << step;
      ASSERT_EQ(begin[to], 0) << "we are the first";
      ASSERT_EQ(counts.at(kShape, kMe, to), send_counts_[to]);
    }
    ASSERT_EQ(experts[0], kOurRows[kMe] + told(step, 1, kRanks) + told(step, 2, kRanks)) << "step " << step;
    ASSERT_EQ(source[1], 1);
    ASSERT_EQ(source[2], 1 + told(step, 1, kMe));
    ASSERT_EQ(source[3], 1 + told(step, 1, kMe) + told(step, 2, kMe));
  }

  // Rows straight from the view of the last dispatch, or from memory of the caller's.
  void combine(uint32_t step, bool in_place, bool weighted) {
    std::vector<float> copy(kRanks * kBound * kElements);
    std::memcpy(copy.data(), view(0, 0), copy.size() * sizeof(float));
    if (!in_place) {
      for (int row = 0; row < kRanks * kBound; ++row) {
        for (int i = 0; i < kElements; ++i) copy[row * kElements + i] = wanted(row / kBound, row % kBound, i);
      }
    }
    const Grid grid{in_place ? view(0, 0) : reinterpret_cast<const std::byte*>(copy.data()),
                    kBound * kElements * sizeof(float), kElements * sizeof(float)};
    const Placement placement{kExpertRank, kExpertSlot};
    const RowTypes types{twFloat32, twFloat32, kElements, weighted};
    float scratch[kElements];
    t_.begin(step);
    send_combine(t_, t_.map(), {0, step}, received_, Part::of(kShape, 0), received_.counts, types, kBound,
                 RankMajorTerms{kShape, placement, kMe, grid}, cpu::sum_rows, reinterpret_cast<std::byte*>(scratch),
                 false);
    for (int source = 1; source < kRanks; ++source) {
      for (int p = 0; p < kTokens; ++p) {
        const std::byte* const sent = t_.at_peer(source, t_.map().inbox(0, static_cast<int>(step & 1), p, 0));
        expect_row(sent, source, p);
      }
    }
    int32_t counts[kRanks];
    const StepEnd end = await_step(t_, t_.map(), {0, step}, Mode::kCombine, kBound, {}, counts);
    ASSERT_EQ(end.code, twSuccess) << "step " << step << ", peer " << end.peer << " at step " << end.seen.step;
    float out[kTokens][kElements];
    receive_combine(
        t_, t_.map(), {0, step}, routing_, Part::of(kShape, 0), RowTypes{twFloat32, twFloat32, kElements, false},
        [](int32_t) { return nullptr; }, reinterpret_cast<std::byte*>(out), sizeof out[0], cpu::sum_rows);
    for (int i = 0; i < kElements; ++i) {
      ASSERT_EQ(out[0][i], value(step, 1, 0, i) + value(step, 2, 0, i)) << "step " << step;
      ASSERT_EQ(out[1][i], wanted(kMe, 0, i) + value(step, 2, 1, i)) << "step " << step;
    }
  }

 private:
  std::byte* view(int source, int p) {
    return t_.local(t_.map().payload(0, static_cast<int>(dispatched_ & 1), 0, source, p, kBound));
  }
  // Our own token that comes to us is our second.
  float wanted(int source, int p, int i) const { return value(dispatched_, source, source == kMe ? p + 1 : p, i); }
  void expect_row(const std::byte* row, int source, int p) const {
    float got[kElements];
    std::memcpy(got, row, sizeof got);
    for (int i = 0; i < kElements; ++i) {
      ASSERT_EQ(got[i], wanted(source, p, i))
          << "row " << p << " of rank " << source << ", dispatched in step " << dispatched_ << ", in step " << t_.step;
    }
  }

  EagerTransport& t_;
  std::vector<int32_t> ids_;
  float weights_[4] = {1, 1, 1, 1};
  int64_t first_[kTokens + 1] = {};
  Destination destinations_[kTokens * kTopK] = {};
  int32_t send_counts_[kRanks] = {};
  int32_t counts_[kRanks] = {};
  std::vector<std::byte> meta_;
  Routing routing_;
  Received received_;
  uint32_t dispatched_ = 0;
};

// Runs a sequence of steps: 'd' dispatch, 'c' combine from the view, 'w' the same weighted, 'm' combine from memory,
// 'x' exchange of counts.
void run(const std::string& sequence, uint32_t before) {
  SCOPED_TRACE(sequence);
  std::map<uint32_t, Mode> plan;
  for (size_t i = 0; i < sequence.size(); ++i) {
    const char kind = sequence[i];
    plan[before + 1 + static_cast<uint32_t>(i)] = kind == 'x'   ? Mode::kCounts
                                                  : kind == 'd' ? Mode::kDispatch
                                                                : Mode::kCombine;
  }
  plan[before + 1 + static_cast<uint32_t>(sequence.size())] = Mode::kDispatch;  // the last step has a hurried peer too
  EagerTransport transport(plan);
  for (int peer = 1; peer < kRanks; ++peer) transport.answer(peer, before + 1);
  Rank rank(transport);
  for (size_t i = 0; i < sequence.size(); ++i) {
    const uint32_t step = before + 1 + static_cast<uint32_t>(i);
    if (sequence[i] == 'x') {
      rank.exchange_counts(step);
    } else if (sequence[i] == 'd') {
      rank.dispatch(step);
    } else {
      rank.combine(step, sequence[i] != 'm', sequence[i] == 'w');
    }
    if (::testing::Test::HasFailure()) return;
  }
}

TEST(EagerPeer, DispatchDispatch) { run("ddddd", 4); }
TEST(EagerPeer, CombineFromTheView) { run("dcdcdc", 4); }
TEST(EagerPeer, CombineFromTheViewOddStep) { run("dcdcdc", 5); }
TEST(EagerPeer, CombineCombine) { run("dcmmmdm", 4); }
TEST(EagerPeer, AnySequence) {
  for (int code = 0; code < 256; ++code) {
    std::string sequence = "d";
    for (int i = 0; i < 8; ++i) {
      const bool dispatch = (code >> i & 1) != 0;
      sequence += dispatch ? 'd' : sequence.back() == 'd' ? 'c' : 'm';
    }
    run(sequence, static_cast<uint32_t>(code));
  }
}
TEST(EagerPeer, Counts) { run("xxxdxdcxmxx", 4); }
TEST(EagerPeer, CountsAcrossTheWrap) { run("xdcxxdcx", 0xfffffffb); }
TEST(EagerPeer, AcrossTheWrap) { run("dcddcmdcdc", 0xfffffffa); }

// The same with weights: partials go through the sum, in scratch memory. Weights of rank 0's expert are 1.
TEST(EagerPeer, WeightedFromTheView) { run("dwdwddw", 4); }

// The CPU's transport, interrupted between two publishes of one step.
class Interrupted : public cpu::CpuTransport {
 public:
  using cpu::CpuTransport::CpuTransport;
  using cpu::CpuTransport::grace_;
  void publish(int peer, uint64_t offset, Signal signal, uint64_t note) {
    cpu::CpuTransport::publish(peer, offset, signal, note);
    if (after) after(peer);
  }
  std::function<void(int)> after;
};

// Three ranks on windows of their own memory.
struct Trio {
  Trio() : bootstraps(make_local_bootstraps(kRanks)), memory(kRanks) {
    cpu::Windows windows;
    for (auto& block : memory) {
      block = ::mmap(nullptr, make_map().bytes(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      windows.by_rank.push_back(std::make_shared<Mapping>(static_cast<std::byte*>(block), make_map().bytes()));
    }
    const std::vector<int> members = {0, 1, 2};
    for (int rank = 0; rank < kRanks; ++rank) {
      Context context;
      context.map = make_map();
      context.me = rank;
      BackendInit init;
      init.context = &context;
      init.bootstrap = bootstraps[rank].get();
      init.members = members;
      init.spin_us = 0;
      ranks.push_back(std::make_unique<Interrupted>(init, windows));
    }
  }
  void send(int rank, uint32_t step) {
    publish_step(*ranks[rank], make_map(), {0, step}, Mode::kDispatch, kBound, [](int) { return 0; });
  }
  StepEnd await(int rank, uint32_t step, TimePoint deadline = {}) {
    int32_t counts[kRanks];
    return await_step(*ranks[rank], make_map(), {0, step}, Mode::kDispatch, kBound, deadline, counts);
  }

  std::vector<std::unique_ptr<Bootstrap>> bootstraps;
  std::vector<void*> memory;
  std::vector<std::unique_ptr<Interrupted>> ranks;
};

// Rank 0 hears of rank 2's step first and runs ahead; what it then sends to rank 1 must not stand for rank 2's signal.
TEST(EagerPeer, EveryWriterHasASignalOfItsOwn) {
  Trio trio;
  for (int rank = 0; rank < kRanks; ++rank) trio.send(rank, 1);
  for (int rank = 0; rank < kRanks; ++rank) ASSERT_EQ(trio.await(rank, 1).code, twSuccess);
  trio.send(0, 2);
  trio.send(1, 2);
  bool looked = false;
  trio.ranks[2]->after = [&](int peer) {
    if (peer != 0) return;
    EXPECT_EQ(trio.await(0, 2).code, twSuccess);
    trio.send(0, 3);
    const StepEnd end = trio.await(1, 2);
    EXPECT_EQ(end.code, twTimeout) << "rank 2 has not published step 2 to rank 1";
    EXPECT_EQ(end.peer, 2);
    looked = true;
  };
  trio.send(2, 2);
  EXPECT_TRUE(looked);
  EXPECT_EQ(trio.await(1, 2).code, twSuccess);
  EXPECT_EQ(trio.await(2, 2).code, twSuccess);
}

// Rank 0 comes through a step and gives the group up while rank 2 still publishes it: rank 1 gets its data. One that
// has not sent the step gives it up for all.
TEST(EagerPeer, ARankThatIsThroughMayGiveUp) {
  Trio trio;
  trio.ranks[1]->grace_ = std::chrono::hours(1);
  trio.send(0, 1);
  trio.send(1, 1);
  StepEnd end;
  std::thread waiting;
  trio.ranks[2]->after = [&](int peer) {
    if (peer != 0) return;
    EXPECT_EQ(trio.await(0, 1).code, twSuccess);
    trio.ranks[0]->announce_abort({twPeerAborted, 0, 0});
    waiting = std::thread([&] { end = trio.await(1, 1, std::chrono::steady_clock::now() + std::chrono::hours(1)); });
    std::this_thread::sleep_for(std::chrono::milliseconds(50));  // so that it is seen, if the machine is not slow
  };
  trio.send(2, 1);
  ASSERT_TRUE(waiting.joinable());
  waiting.join();
  EXPECT_EQ(end.code, twSuccess);
  trio.ranks[2]->after = {};
  trio.send(1, 2);
  trio.send(2, 2);
  EXPECT_EQ(trio.await(1, 2).code, twExcluded) << "rank 0 has not sent step 2";
}

}  // namespace
}  // namespace tw
