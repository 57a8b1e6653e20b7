#include "hosts_world.h"

#include <numeric>

#include "core/group.h"
#include "net/fabric.h"

namespace tw::test {
namespace {

// Engines keep the net that they are of.
class Held final : public PassedOn {
 public:
  Held(std::shared_ptr<PretendedNet> between, std::unique_ptr<net::Engine> engine)
      : PassedOn(std::move(engine)), net_(std::move(between)) {}

 private:
  std::shared_ptr<PretendedNet> net_;
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
      *engine = std::make_unique<Held>(between, between->engine(static_cast<int>(me), net::FabricOptions{}.depth));
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
