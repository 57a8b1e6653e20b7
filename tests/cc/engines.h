// Ranks in threads of this process, joined by an engine of each kind that there is, each with a window to write from
// and one to write to.
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "bootstrap/bootstrap.h"
#include "harness.h"
#include "net/fabric.h"
#include "pretended_engine.h"
#include "scripted_endpoint.h"

namespace tw::test {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;
using net::Posted;

inline constexpr auto kNobodyWaitsAsLong = 60s;

// kScripted is the engine over libfabric with an endpoint whose messages overtake writes; kTcp and kShm are libfabric.
enum class Kind { kPretended, kScripted, kTcp, kShm };
inline const char* name_of(Kind kind) {
  constexpr const char* kNames[] = {"pretended", "scripted", "tcp", "shm"};
  return kNames[static_cast<int>(kind)];
}
inline bool is_libfabric(Kind kind) { return kind == Kind::kTcp || kind == Kind::kShm; }

// Why libfabric's engine cannot be tested here; "": it can.
inline std::string libfabric_missing() {
  const net::Library* library = nullptr;
  return net::find_library(&library).text();
}

struct EnginesOf {
  // bytes: of each window. chunk: longer puts go in pieces.
  EnginesOf(Kind kind, int ranks, uint64_t bytes, net::FabricOptions given = {}, Script script = {})
      : options(std::move(given)),
        bootstraps(make_local_bootstraps(ranks)),
        pretended(ranks, 1, 3),
        hub(ranks, script),
        engines(ranks),
        sources(ranks, std::vector<std::byte>(bytes)),
        targets(ranks, std::vector<std::byte>(bytes)) {
    for (int rank = 0; rank < ranks; ++rank) members.push_back(rank);
    if (is_libfabric(kind)) options.provider = name_of(kind);
    on_all_ranks(ranks, [&](int rank) {
      const Status connected = connect(kind, rank);
      ASSERT_TRUE(connected.ok()) << connected.text();
      int window = -1;
      ASSERT_TRUE(engines[rank]->add_window(meeting(rank, 10), sources[rank].data(), bytes, &window).ok());
      EXPECT_EQ(window, kSource);
      ASSERT_TRUE(engines[rank]->add_window(meeting(rank, 20), targets[rank].data(), bytes, &window).ok());
      EXPECT_EQ(window, kTarget);
    });
  }

  net::Engine& operator[](int rank) { return *engines[static_cast<size_t>(rank)]; }
  int size() const { return static_cast<int>(engines.size()); }
  net::Meeting meeting(int rank, uint64_t tag) {
    return {bootstraps[static_cast<size_t>(rank)].get(), members, tag, Clock::now() + kNobodyWaitsAsLong};
  }

  Status connect(Kind kind, int rank) {
    auto& engine = engines[static_cast<size_t>(rank)];
    if (kind == Kind::kPretended) {
      engine = pretended.engine(rank, options.depth);
      return {};
    }
    if (is_libfabric(kind)) return net::connect_fabric(options, meeting(rank, 0), &engine);
    return net::connect_endpoint(options, meeting(rank, 0), hub.endpoint(rank), {}, &engine);
  }

  // A put from an offset of the source window to one of the peer's target window.
  static net::Put put(uint64_t from, uint64_t to, uint64_t bytes) { return {{kSource, from}, {kTarget, to}, bytes}; }
  static net::Word word(uint64_t at, uint64_t add) { return {{kTarget, at}, add}; }

  // Puts as soon as there is room.
  Posted insist(int rank, int peer, const net::Put& put, const std::optional<net::Word>& word = {}) {
    const auto until = Clock::now() + kNobodyWaitsAsLong;
    for (;;) {
      net::Engine& engine = (*this)[rank];
      const Posted posted = word ? engine.put(peer, put, *word) : engine.put(peer, put);
      if (posted != Posted::kFull || Clock::now() > until) return posted;
      if (!engine.poll()) std::this_thread::yield();
    }
  }

  uint64_t load(int rank, uint64_t at) {
    return std::atomic_ref(*reinterpret_cast<uint64_t*>(targets[static_cast<size_t>(rank)].data() + at))
        .load(std::memory_order_acquire);
  }
  // Until a word of the rank's has a value. False if it does not come.
  bool await_word(int rank, uint64_t at, uint64_t value) {
    return await([&] { return load(rank, at) == value; }, rank);
  }
  bool await_done(int rank, int peer, uint64_t count) {
    return await([&] { return (*this)[rank].done(peer) >= count; }, rank);
  }
  template <class Over>
  bool await(const Over& over, int rank) {
    const auto until = Clock::now() + kNobodyWaitsAsLong;
    while (!over()) {
      if (Clock::now() > until) return false;
      if (!(*this)[rank].poll()) std::this_thread::yield();
    }
    return true;
  }
  void close() {
    on_all_ranks(size(), [&](int rank) {
      const Status closed = (*this)[rank].close(meeting(rank, 30));
      EXPECT_TRUE(closed.ok()) << closed.text();
    });
  }

  static constexpr int kSource = 0;
  static constexpr int kTarget = 1;
  net::FabricOptions options;
  std::vector<std::unique_ptr<Bootstrap>> bootstraps;
  std::vector<int> members;
  PretendedNet pretended;
  ScriptedHub hub;
  std::vector<std::unique_ptr<net::Engine>> engines;
  std::vector<std::vector<std::byte>> sources;
  std::vector<std::vector<std::byte>> targets;
};

}  // namespace tw::test
