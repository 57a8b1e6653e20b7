// The network of emulated devices (src/cuda/transport/network.h): the engine between hosts over libfabric's tcp, whose
// windows are the devices' memory, as that is the CPU's.
#include "cuda/transport/network.h"

#include <chrono>

#include "../gin/counts.h"
#include "net/fabric.h"
#include "network_state.h"

namespace tw::cuda {
namespace {

class EmulatedNetwork final : public Network {
 public:
  Status connect(const net::Meeting& meeting) {
    net::FabricOptions options;
    options.patience = std::chrono::hours(24 * 365);  // kernels' own waits end by their group's timeout
    TW_RETURN_IF_FAILED(net::connect_fabric(options, meeting, &engine_));
    state_.engine = engine_.get();
    state_.counts_alone = gin::counts_alone();
    return {};
  }

  Status add_memory(const net::Meeting& meeting, std::byte* memory, uint64_t bytes, int* number) override {
    return engine_->add_window(meeting, memory, bytes, number);
  }
  NetView view() const override { return {&state_}; }
  Status failure() override {
    if (emulator::is_broken(engine_->rank())) return fail(twSystemError, "a test has broken it");
    for (int peer = 0; peer < engine_->size(); ++peer) TW_RETURN_IF_FAILED(engine_->failure(peer));
    return {};
  }
  void abort() override { state_.aborted = true; }

 private:
  std::unique_ptr<net::Engine> engine_;
  emulator::NetworkState state_;
};

}  // namespace

Status connect_network(const BackendInit&, const net::Meeting& meeting, int, std::unique_ptr<Network>* made) {
  auto network = std::make_unique<EmulatedNetwork>();
  TW_RETURN_IF_FAILED(network->connect(meeting));
  *made = std::move(network);
  return {};
}

}  // namespace tw::cuda

namespace tw {

// There is no NCCL beneath emulated devices.
Status network_version(std::string*) { return fail(twUnsupported, "emulated devices have a network without NCCL"); }

}  // namespace tw

namespace tw::emulator {
namespace {

constexpr int kHeld = 16;  // the first ranks
std::atomic<bool> held[kHeld][kHeld];
std::atomic<bool> lost;
std::atomic<bool> broken[kHeld];

}  // namespace

bool is_held(int source, int peer) { return source < kHeld && peer < kHeld && held[source][peer].load(); }
bool loses_puts() { return lost.load(); }
bool is_broken(int rank) { return rank < kHeld && broken[rank].load(); }

extern "C" __attribute__((visibility("default"))) void tokenway_emulated_hold(int source, int peer, int hold) {
  held[source][peer] = hold != 0;
}
extern "C" __attribute__((visibility("default"))) void tokenway_emulated_lose_puts(int lose) { lost = lose != 0; }
extern "C" __attribute__((visibility("default"))) void tokenway_emulated_break(int rank, int breaks) {
  broken[rank] = breaks != 0;
}

// Gives what was posted since it was last asked: [ranks, ranks, kPostKinds], by source and peer.
extern "C" __attribute__((visibility("default"))) void tokenway_posts(int ranks, uint64_t* found) {
  gin::post_counts().take(ranks, found);
}

}  // namespace tw::emulator
