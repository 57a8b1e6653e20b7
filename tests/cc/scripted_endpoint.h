// Endpoints between threads of this process, for the engine over libfabric without libfabric: what a provider may do,
// and tcp does not, is written here. Messages overtake writes that are under way (unless it is `ordered`), writes to a
// peer may be stuck for ever, and every other call may have to come again.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "net/endpoint.h"

namespace tw::test {

struct Script {
  bool ordered = false;
  int late = 3;  // a write lands when its endpoint has made progress so often
  bool again = false;
  uint64_t largest = UINT64_MAX;
};

class ScriptedEndpoint;

// What the endpoints have in common.
struct ScriptedHub {
  explicit ScriptedHub(int ranks, Script given = {}) : script(given), ends(ranks) {}
  std::unique_ptr<net::Endpoint> endpoint(int rank);
  // Brings a rank a message from nowhere.
  void bring(int rank, const void* from, size_t bytes);

  const Script script;
  std::mutex mutex;
  std::vector<ScriptedEndpoint*> ends;
  std::set<std::pair<int, int>> stuck;    // (from, to): operations that never end
  std::set<std::pair<int, int>> refused;  // operations that fail when they are posted
  std::atomic<int> undelivered = 0;       // writes that were not asked to tell of their delivery
  std::atomic<int> overtaken = 0;         // messages that left while writes to the same peer were under way
};

class ScriptedEndpoint final : public net::Endpoint {
 public:
  ScriptedEndpoint(ScriptedHub& hub, int rank) : hub_(hub), me_(rank) { hub.ends[static_cast<size_t>(rank)] = this; }
  ~ScriptedEndpoint() override {
    const std::lock_guard lock(hub_.mutex);
    hub_.ends[static_cast<size_t>(me_)] = nullptr;
  }

  std::string provider() const override { return "scripted"; }
  std::string name() const override { return std::to_string(me_); }
  Status add_peer(const std::string&) override { return {}; }
  bool ordered() const override { return hub_.script.ordered; }
  uint64_t largest() const override { return hub_.script.largest; }
  size_t depth() const override { return 64; }
  Status add_memory(std::byte* memory, uint64_t bytes, net::Registered* registered) override {
    *registered = {nullptr, {bytes, reinterpret_cast<uint64_t>(memory), 7}};
    return {};
  }

  net::Sent write(int peer, const void* from, uint64_t bytes, void*, uint64_t to, uint64_t, bool delivered,
                  net::Context* context, int* error) override {
    const std::lock_guard lock(hub_.mutex);
    if (const net::Sent sent = judge(peer, error); sent != net::Sent::kSent) return sent;
    if (!delivered) ++hub_.undelivered;
    EXPECT_LE(bytes, hub_.script.largest);
    Flying write{peer, from, bytes, reinterpret_cast<std::byte*>(to), context, hub_.script.late, {}};
    if (!delivered) keep(write);
    flying_.push_back(std::move(write));
    return net::Sent::kSent;
  }

  net::Sent send(int peer, const void* from, uint64_t bytes, void*, net::Context* context, int* error) override {
    const std::lock_guard lock(hub_.mutex);
    if (const net::Sent sent = judge(peer, error); sent != net::Sent::kSent) return sent;
    Flying message{peer, from, bytes, nullptr, context, 0, {}};
    if (hub_.script.ordered) {
      keep(message);
      flying_.push_back(std::move(message));
    } else {
      for (const Flying& other : flying_) hub_.overtaken += other.peer == peer;
      land(message);
    }
    return net::Sent::kSent;
  }

  net::Sent receive(void* to, uint64_t, void*, net::Context* context, int*) override {
    const std::lock_guard lock(hub_.mutex);
    receives_.emplace_back(to, context);
    return net::Sent::kSent;
  }

  int progress(std::span<net::Completion> ended, int*) override {
    const std::lock_guard lock(hub_.mutex);
    for (Flying& operation : flying_) --operation.left;
    // Writes land in the order in which they were posted, each at its time.
    while (!flying_.empty() && flying_.front().left <= 0) {
      land(flying_.front());
      flying_.pop_front();
    }
    while (!inbox_.empty() && !receives_.empty()) {
      std::memcpy(receives_.front().first, inbox_.front().data(), inbox_.front().size());
      ended_.push_back({receives_.front().second, 0});
      receives_.pop_front();
      inbox_.pop_front();
    }
    const size_t count = std::min(ended.size(), ended_.size());
    for (size_t i = 0; i < count; ++i) {
      ended[i] = ended_.front();
      ended_.pop_front();
    }
    return static_cast<int>(count);
  }

  int sleep_on() override { return -1; }
  std::string text_of(int error) const override { return "scripted error " + std::to_string(error); }

 private:
  friend struct ScriptedHub;
  struct Flying {
    int peer;
    const void* from;  // read when it lands, as a NIC may
    uint64_t bytes;
    std::byte* to;          // NULL: a message
    net::Context* context;  // NULL: its end is told already
    int left;
    std::vector<std::byte> kept;  // what was read at once, if not empty
  };

  net::Sent judge(int peer, int* error) {
    if (hub_.refused.contains({me_, peer}) || hub_.ends[static_cast<size_t>(peer)] == nullptr) {
      *error = 5;
      return net::Sent::kFailed;
    }
    calls_ += 1;
    return hub_.script.again && calls_ % 2 == 1 ? net::Sent::kAgain : net::Sent::kSent;
  }

  void land(const Flying& operation) {
    if (hub_.stuck.contains({me_, operation.peer})) return;
    ScriptedEndpoint* const peer = hub_.ends[static_cast<size_t>(operation.peer)];
    if (peer == nullptr) {
      tell(operation, 6);
      return;
    }
    if (operation.to == nullptr) {
      const auto* const data = static_cast<const std::byte*>(operation.from);
      peer->inbox_.emplace_back(data, data + operation.bytes);
    } else {
      std::memcpy(operation.to, operation.from, operation.bytes);
    }
    tell(operation, 0);
  }

  // As a socket does: the source is free at once, and the data are on their way.
  void keep(Flying& operation) {
    const auto* const data = static_cast<const std::byte*>(operation.from);
    operation.kept.assign(data, data + operation.bytes);
    operation.from = operation.kept.data();
    if (!hub_.stuck.contains({me_, operation.peer})) tell(operation, 0);
    operation.context = nullptr;
  }

  void tell(const Flying& operation, int error) {
    if (operation.context != nullptr) ended_.push_back({operation.context, error});
  }

  ScriptedHub& hub_;
  const int me_;
  int calls_ = 0;
  std::deque<Flying> flying_;
  std::deque<std::pair<void*, net::Context*>> receives_;
  std::deque<std::vector<std::byte>> inbox_;
  std::deque<net::Completion> ended_;
};

inline std::unique_ptr<net::Endpoint> ScriptedHub::endpoint(int rank) {
  return std::make_unique<ScriptedEndpoint>(*this, rank);
}

inline void ScriptedHub::bring(int rank, const void* from, size_t bytes) {
  const std::lock_guard lock(mutex);
  const auto* const data = static_cast<const std::byte*>(from);
  ends[static_cast<size_t>(rank)]->inbox_.emplace_back(data, data + bytes);
}

}  // namespace tw::test
