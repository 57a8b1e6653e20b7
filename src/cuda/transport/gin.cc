// The network of devices over NCCL: a communicator that is made without blocking, so that each collective step ends by
// the meeting's deadline; a device communicator with a context for each channel, connected to all ranks; and a window
// for each memory. Ranks learn NCCL's id of the communicator, and of each other's errors, over the bootstrap.
//
// Threads. NCCL's calls on one communicator come from one thread at a time (mutex_), and none of them waits. abort
// makes none: it writes a word that kernels look at (net.cuh). What they use is freed by the destructor alone, when
// none runs: ncclCommAbort in another thread would free it under them.
//
// What breaks if this changes: S6, where a step of NCCL's is waited for longer than the deadline, or the caller's
// function is asked while mutex_ is held (core/interrupt.h).
#include "cuda/transport/network.h"

#if TOKENWAY_WITH_GIN
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <mutex>
#include <thread>

#include "core/interrupt.h"
#include "cuda/driver/driver.h"
#include "cuda/driver/nccl.h"
#include "cuda/transport/gin.h"
#endif

namespace tw::cuda {

#if TOKENWAY_WITH_GIN
namespace {

constexpr char kConnecting[] = "connecting the network of devices";
constexpr char kAdding[] = "adding memory to the network of devices";
constexpr std::chrono::microseconds kPoll{200};
constexpr std::chrono::seconds kEnd{10};  // for what NCCL does alone when it takes things down

Status meet(const net::Meeting& meeting, uint64_t step, const char* occasion, const Status& mine) {
  return agree(*meeting.bootstrap, meeting.members, meeting.tag + step, meeting.deadline, occasion, mine);
}

const char* name_of(ncclGinType_t type) {
  switch (type) {
    case NCCL_GIN_TYPE_NONE:
      return "none";
    case NCCL_GIN_TYPE_PROXY:
      return "PROXY";
    case NCCL_GIN_TYPE_GDAKI:
      return "GDAKI";
    default:
      return "another";
  }
}

class GinNetwork final : public Network {
 public:
  explicit GinNetwork(int device) : device_(device) {}
  ~GinNetwork() override;

  Status connect(const net::Meeting& meeting, int contexts);
  Status add_memory(const net::Meeting& meeting, std::byte* memory, uint64_t bytes, int* number) override;
  NetView view() const override { return {state_}; }
  Status failure() override;
  void abort() override;

 private:
  Status exchange_id(const net::Meeting& meeting, ncclUniqueId* id);
  Status join(const net::Meeting& meeting, const ncclUniqueId& id);
  Status check_properties();
  Status make_contexts(const net::Meeting& meeting, int contexts);
  Status add_window(const net::Meeting& meeting, std::byte* memory, uint64_t bytes);
  template <class Start>
  Status finish(const char* what, TimePoint deadline, const net::Meeting* meeting, Start&& start);
  ncclResult_t ask();
  Status usable();
  bool take_down();
  Status copy(size_t at, const void* from, size_t bytes);

  const int device_;
  const Nccl* nccl_ = nullptr;
  ncclComm_t comm_ = nullptr;
  ncclDevComm dev_{};
  bool has_dev_ = false;
  int count_ = 0;                         // memories
  ncclWindow_t windows_[kNetMemories]{};  // NCCL writes here until a step has ended
  cudaStream_t stream_ = nullptr;         // as the caller's streams may be busy waiting
  GinState* state_ = nullptr;             // in the device's memory
  std::atomic<bool> stopped_ = false;
  std::mutex mutex_;
  bool in_step_ = false;
  Status failed_step_;  // the first; NCCL tells of no later error then, so nobody knows how puts are
  Status problem_;      // the first of puts
};

// What NCCL says of its last step; the first failure stays.
ncclResult_t GinNetwork::ask() {
  ncclResult_t found = ncclSuccess;
  const ncclResult_t asked = nccl_->async_error(comm_, &found);
  return asked != ncclSuccess ? asked : found;
}

// Starts a step of NCCL's and waits for its end. Where it does not end, or fails, NCCL makes no further one.
template <class Start>
Status GinNetwork::finish(const char* what, TimePoint deadline, const net::Meeting* meeting, Start&& start) {
  ncclResult_t result = ncclSuccess;
  {
    const std::lock_guard lock(mutex_);
    in_step_ = true;
    result = start();
    // Some of NCCL's calls say that they have ended when they have only begun (2.32's ncclDevCommCreate).
    if (result == ncclSuccess) result = ask();
  }
  Status ended;
  while (result == ncclInProgress && ended.ok()) {
    if (is_interrupted()) ended = fail(twInterrupted, "NCCL was interrupted while it was to {}", what);
    if (stopped_) ended = fail(twPeerAborted, "NCCL was ended while it was to {}", what);
    if (std::chrono::steady_clock::now() >= deadline) ended = fail(twTimeout, "NCCL did not {} in time", what);
    for (size_t i = 0; meeting != nullptr && i < meeting->members.size() && ended.ok(); ++i) {
      const int member = meeting->members[i];
      if (member == meeting->bootstrap->rank() || meeting->bootstrap->alive(member)) continue;
      ended = fail(twPeerDied, "NCCL was to {}: rank {} is gone", what, member);
    }
    std::this_thread::sleep_for(kPoll);
    const std::lock_guard lock(mutex_);
    result = ask();
  }
  if (ended.ok()) ended = nccl_->check(what, result);
  const std::lock_guard lock(mutex_);
  in_step_ = false;
  if (!ended.ok() && failed_step_.ok()) failed_step_ = ended;
  return ended;
}

Status GinNetwork::copy(size_t at, const void* from, size_t bytes) {
  TW_CUDA(cudaMemcpyAsync(reinterpret_cast<std::byte*>(state_) + at, from, bytes, cudaMemcpyHostToDevice, stream_));
  TW_CUDA(cudaStreamSynchronize(stream_));
  return {};
}

// The first rank makes NCCL's id of the communicator, and tells it.
Status GinNetwork::exchange_id(const net::Meeting& meeting, ncclUniqueId* id) {
  const bool first = meeting.members.front() == meeting.bootstrap->rank();
  Status ready = find_nccl(&nccl_);
  if (ready.ok() && first) ready = nccl_->check("begin a communicator", nccl_->unique_id(id));
  std::vector<Parcel> all;
  Status met = gather(*meeting.bootstrap, meeting.members, meeting.tag, {pack_result(ready).add(*id).take(), {}},
                      meeting.deadline, kConnecting, &all);
  TW_RETURN_IF_FAILED(std::move(ready));
  TW_RETURN_IF_FAILED(std::move(met));
  for (size_t i = 0; i < all.size(); ++i) {
    Unpacker reader(all[i].bytes);
    TW_RETURN_IF_FAILED(read_result(meeting.members[i], reader));
    if (i == 0) *id = reader.get<ncclUniqueId>();
  }
  return {};
}

// Makes the communicator. NCCL's own collectives are never called, nor its puts from the host.
Status GinNetwork::join(const net::Meeting& meeting, const ncclUniqueId& id) {
  const std::span<const int> members = meeting.members;
  const auto me = std::find(members.begin(), members.end(), meeting.bootstrap->rank()) - members.begin();
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  config.maxCTAs = 1;
  config.numRmaCtx = 0;
  config.commName = "tokenway";
  TW_RETURN_IF_FAILED(finish("connect the ranks", meeting.deadline, &meeting, [&] {
    return nccl_->init(&comm_, static_cast<int>(members.size()), id, static_cast<int>(me), &config);
  }));
  return check_properties();
}

Status GinNetwork::check_properties() {
  ncclCommProperties_t properties = NCCL_COMM_PROPERTIES_INITIALIZER;
  TW_RETURN_IF_FAILED(nccl_->check("tell what it can", nccl_->properties(comm_, &properties)));
  if (properties.deviceApiSupport && properties.ginType != NCCL_GIN_TYPE_NONE) return {};
  int version = 0;
  (void)nccl_->version(&version);
  return fail(
      twUnsupported,
      "NCCL {} cannot put from a device's kernels to all ranks here (device API: {}; GIN: {}, within rails {}). "
      "It needs on every host an RDMA NIC or a plugin (NCCL_NET_PLUGIN, NCCL_RMA_PLUGIN) with NICs that all "
      "reach each other, GPUDirect RDMA, and NCCL_CUMEM_ENABLE and NCCL_GIN_ENABLE not 0; NCCL_DEBUG=INFO says "
      "what it found",
      nccl_version_text(version), properties.deviceApiSupport ? "yes" : "no", name_of(properties.ginType),
      name_of(properties.railedGinType));
}

// Makes the contexts, and what kernels have of them. VA signals and strong ones are required by default.
Status GinNetwork::make_contexts(const net::Meeting& meeting, int contexts) {
  ncclDevCommRequirements_t needs = NCCL_DEV_COMM_REQUIREMENTS_INITIALIZER;
  needs.ginConnectionType = NCCL_GIN_CONNECTION_FULL;
  needs.ginContextCount = contexts;
  needs.ginExclusiveContexts = true;
  needs.ginStrongSignalsRequired = true;
  needs.ginVaSignalsRequired = true;
  TW_RETURN_IF_FAILED(finish("make contexts for kernels", meeting.deadline, &meeting,
                             [&] { return nccl_->make_device_comm(comm_, &needs, &dev_); }));
  has_dev_ = true;
  if (dev_.ginContextCount < static_cast<uint32_t>(contexts)) {
    return fail(twUnsupported, "NCCL gives {} contexts for kernels, and {} channels need one each",
                static_cast<uint64_t>(dev_.ginContextCount), contexts);
  }
  TW_CUDA(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
  TW_CUDA(cudaMallocAsync(&state_, sizeof *state_, stream_));
  TW_CUDA(cudaMemsetAsync(state_, 0, sizeof *state_, stream_));
  return copy(offsetof(GinState, comm), &dev_, sizeof dev_);
}

Status GinNetwork::connect(const net::Meeting& meeting, int contexts) {
  const OnDevice on(device_);
  const OutsideCaptures outside;
  ncclUniqueId id{};
  TW_RETURN_IF_FAILED(exchange_id(meeting, &id));
  TW_RETURN_IF_FAILED(meet(meeting, 1, kConnecting, join(meeting, id)));
  return meet(meeting, 2, kConnecting, make_contexts(meeting, contexts));
}

Status GinNetwork::add_window(const net::Meeting& meeting, std::byte* memory, uint64_t bytes) {
  ncclWindow_t* const window = &windows_[count_];
  *window = nullptr;
  // Words lie among the rows, so that all memory is as strict as words need it.
  TW_RETURN_IF_FAILED(finish("register memory", meeting.deadline, &meeting, [&] {
    return nccl_->add_window(comm_, memory, bytes, window, NCCL_WIN_COLL_SYMMETRIC | NCCL_WIN_STRICT_ORDERING);
  }));
  if (*window == nullptr) return fail(twUnsupported, "NCCL registers no memory of this device for its peers");
  return copy(offsetof(GinState, windows) + static_cast<size_t>(count_) * sizeof *window, window, sizeof *window);
}

// Where another rank fails, this rank's window stays until the end; its place is taken by the next.
Status GinNetwork::add_memory(const net::Meeting& meeting, std::byte* memory, uint64_t bytes, int* number) {
  const OnDevice on(device_);
  const OutsideCaptures outside;
  Status ready = usable();
  if (ready.ok() && count_ == kNetMemories) {
    ready = fail(twOutOfMemory, "the network has {} memories; make a group of this size", kNetMemories);
  }
  TW_RETURN_IF_FAILED(meet(meeting, 0, kAdding, ready));
  TW_RETURN_IF_FAILED(meet(meeting, 1, kAdding, add_window(meeting, memory, bytes)));
  *number = count_++;
  return {};
}

Status GinNetwork::failure() {
  const std::lock_guard lock(mutex_);
  // What NCCL says while a step is under way, or has failed, is of that step.
  if (problem_.ok() && failed_step_.ok() && !in_step_) {
    const ncclResult_t found = ask();
    if (found != ncclInProgress) problem_ = nccl_->check("put to all peers", found);
  }
  if (problem_.ok() && stopped_) return fail(twPeerAborted, "the network was ended on this rank");
  return problem_;
}

// Whether NCCL may make a further step.
Status GinNetwork::usable() {
  Status puts = failure();
  const std::lock_guard lock(mutex_);
  return puts.ok() ? failed_step_ : puts;
}

void GinNetwork::abort() {
  if (stopped_.exchange(true) || state_ == nullptr) return;
  const OnDevice on(device_);
  const OutsideCaptures outside;
  cudaMemsetAsync(&state_->stopped, 1, sizeof state_->stopped, stream_);  // any value but 0 will do
  (void)cudaGetLastError();
}

// Gives back what NCCL holds, in order. False: something failed.
bool GinNetwork::take_down() {
  const TimePoint deadline = std::chrono::steady_clock::now() + kEnd;
  bool ok = true;
  for (int i = count_ - 1; i >= 0 && ok; --i) {
    ok = finish("drop memory", deadline, nullptr, [&] { return nccl_->drop_window(comm_, windows_[i]); }).ok();
  }
  if (!has_dev_ || !ok) return ok;
  return finish("drop contexts", deadline, nullptr, [&] { return nccl_->drop_device_comm(comm_, &dev_); }).ok();
}

GinNetwork::~GinNetwork() {
  const OnDevice on(device_);
  const OutsideCaptures outside;
  // ncclCommAbort asks nobody, and ends a step that is under way; ncclCommDestroy may be called after success alone.
  if (comm_ != nullptr) {
    if (usable().ok() && take_down()) {
      (void)nccl_->destroy(comm_);
    } else {
      (void)nccl_->abort(comm_);
    }
  }
  if (stream_ != nullptr) {
    if (state_ != nullptr) cudaFreeAsync(state_, stream_);
    cudaStreamSynchronize(stream_);
    cudaStreamDestroy(stream_);
  }
  (void)cudaGetLastError();
}

}  // namespace

Status connect_network(const BackendInit& init, const net::Meeting& meeting, int contexts,
                       std::unique_ptr<Network>* made) {
  auto network = std::make_unique<GinNetwork>(init.device);
  TW_RETURN_IF_FAILED(network->connect(meeting, contexts));
  *made = std::move(network);
  return {};
}

Status version_of_network(std::string* version) {
  const Nccl* nccl = nullptr;
  int number = 0;
  TW_RETURN_IF_FAILED(find_nccl(&nccl));
  TW_RETURN_IF_FAILED(nccl->check("tell its version", nccl->version(&number)));
  *version = nccl_version_text(number);
  return {};
}
#else
namespace {

Status missing() { return fail(twUnsupported, "this library was built without NCCL's headers (2.30.7 or newer)"); }

}  // namespace

Status connect_network(const BackendInit&, const net::Meeting&, int, std::unique_ptr<Network>*) { return missing(); }
Status version_of_network(std::string*) { return missing(); }
#endif

}  // namespace tw::cuda

namespace tw {

Status network_version(std::string* version) { return cuda::version_of_network(version); }

}  // namespace tw
