#include "hosts_world.h"

#include <numeric>

#include "core/group.h"

namespace tw::test {
namespace {

// Engines keep the net that they are of.
class Held final : public net::Engine {
 public:
  Held(std::shared_ptr<PretendedNet> between, std::unique_ptr<net::Engine> engine)
      : net_(std::move(between)), engine_(std::move(engine)) {}

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
  std::shared_ptr<PretendedNet> net_;
  std::unique_ptr<net::Engine> engine_;
};

}  // namespace

std::shared_ptr<PretendedNet> Nets::at(uint64_t tag, int ranks) {
  const std::lock_guard lock(mutex_);
  std::shared_ptr<PretendedNet>& found = nets_[tag];
  if (found == nullptr) {
    found = std::make_shared<PretendedNet>(ranks, seed_ + tag, late_);
    if (prepare) prepare(*found);
    last_ = found;
  }
  return found;
}

void spread(const std::vector<twComm_t>& comms, const std::vector<int>& hosts, const std::shared_ptr<Nets>& nets) {
  std::vector<int> of;
  for (size_t host = 0; host < hosts.size(); ++host) of.insert(of.end(), hosts[host], static_cast<int>(host));
  of.resize(comms.size());  // the last host may be smaller
  for (const twComm_t comm : comms) {
    comm->hosts = std::make_unique<Hosts>();
    comm->hosts->of = of;
    comm->hosts->connect = [nets](const net::Meeting& meeting, std::unique_ptr<net::Engine>* engine) -> Status {
      const auto ranks = static_cast<int>(meeting.members.size());
      const auto me = std::ranges::find(meeting.members, meeting.bootstrap->rank()) - meeting.members.begin();
      const std::shared_ptr<PretendedNet> between = nets->at(meeting.tag, ranks);
      *engine = std::make_unique<Held>(between, between->engine(static_cast<int>(me)));
      if (nets->wrap) *engine = nets->wrap(std::move(*engine));
      return {};
    };
  }
}

std::vector<twComm_t> comms_on(const std::vector<int>& hosts, const std::shared_ptr<Nets>& nets) {
  std::vector<twComm_t> comms(static_cast<size_t>(std::accumulate(hosts.begin(), hosts.end(), 0)));
  EXPECT_TW(twSuccess, twCommCreateLocal(comms.data(), static_cast<int32_t>(comms.size()), nullptr));
  spread(comms, hosts, nets);
  return comms;
}

}  // namespace tw::test
