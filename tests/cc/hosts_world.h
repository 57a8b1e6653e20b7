// Ranks of this process that take each other for ranks of several hosts: between hosts they have pretended engines, and
// among the ranks of a host the memory that they share.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "harness.h"
#include "pretended_engine.h"

namespace tw::test {

// Passes everything on: what engines of tests begin with that look at what goes by.
class PassedOn : public net::Engine {
 public:
  explicit PassedOn(std::unique_ptr<net::Engine> engine) : engine_(std::move(engine)) {}

  int rank() const override { return engine_->rank(); }
  int size() const override { return engine_->size(); }
  Status add_window(const net::Meeting& meeting, std::byte* memory, uint64_t bytes, int* window) override {
    return engine_->add_window(meeting, memory, bytes, window);
  }
  net::Posted put(int peer, const net::Put& put) override { return engine_->put(peer, put); }
  net::Posted put(int peer, const net::Put& put, const net::Word& word) override {
    return engine_->put(peer, put, word);
  }
  uint64_t taken(int peer) const override { return engine_->taken(peer); }
  uint64_t done(int peer) const override { return engine_->done(peer); }
  bool poll() override { return engine_->poll(); }
  Status failure(int peer) const override { return engine_->failure(peer); }
  void give_up(int peer, const Status& why) override { engine_->give_up(peer, why); }
  Status close(const net::Meeting& meeting) override { return engine_->close(meeting); }

 private:
  std::unique_ptr<net::Engine> engine_;
};

// What is between hosts: a net for each group that is made, by the tag that its ranks meet at.
class Nets {
 public:
  explicit Nets(uint64_t seed = 1, int late = 0) : seed_(seed), late_(late) {}

  // Called with each net before its first engine is made.
  std::function<void(PretendedNet&)> prepare;
  // Called with each engine that is made: gives the one that is used.
  std::function<std::unique_ptr<net::Engine>(std::unique_ptr<net::Engine>)> wrap;

  std::shared_ptr<PretendedNet> at(uint64_t tag, int ranks);
  // The net of the group that was made last.
  PretendedNet& last() { return *last_; }

 private:
  std::mutex mutex_;
  uint64_t seed_;
  int late_;
  std::map<uint64_t, std::shared_ptr<PretendedNet>> nets_;
  std::shared_ptr<PretendedNet> last_;
};

// Comms of local ranks on hosts of so many ranks each.
std::vector<twComm_t> comms_on(const std::vector<int>& hosts, const std::shared_ptr<Nets>& nets);
// Puts local comms on such hosts.
void spread(const std::vector<twComm_t>& comms, const std::vector<int>& hosts, const std::shared_ptr<Nets>& nets);

}  // namespace tw::test
