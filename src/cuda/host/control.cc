// Control pages, their registration with CUDA, and the watching thread: control.h tells what they are for.
//
// What breaks if this changes: S6. A page must be registered once per process and stay while any kernel may look at it;
// take() must see a report whole (serial before and after); a peer that is gone is granted kLastWords, as its last
// signal may be on its way.
#include "cuda/host/control.h"

#include <sys/mman.h>

#include <cstring>
#include <map>

namespace tw::cuda {
namespace {

constexpr std::chrono::milliseconds kLook{20};
// Time from seeing that a peer is gone to stopping: its last signals may be on their way through a kernel.
constexpr std::chrono::milliseconds kLastWords{100};

constexpr uint64_t kPageBytes = (sizeof(ControlPage) + 4095) / 4096 * 4096;

uint64_t load(const uint64_t& word) {
  return std::atomic_ref(const_cast<uint64_t&>(word)).load(std::memory_order_acquire);
}

}  // namespace

class Registered {
 public:
  explicit Registered(std::shared_ptr<Mapping> mapping) : mapping_(std::move(mapping)) {}
  ~Registered() {
    if (registered_) cudaHostUnregister(mapping_->data());
  }

  Status begin() {
    TW_CUDA(cudaHostRegister(mapping_->data(), mapping_->bytes(), cudaHostRegisterPortable | cudaHostRegisterMapped));
    registered_ = true;
    return {};
  }

  static Status find(const std::shared_ptr<Mapping>& mapping, std::shared_ptr<Registered>* found) {
    static std::mutex mutex;
    static auto* const known = new std::map<std::byte*, std::weak_ptr<Registered>>;
    const std::lock_guard lock(mutex);
    *found = (*known)[mapping->data()].lock();
    if (*found != nullptr) return {};
    auto made = std::make_shared<Registered>(mapping);
    TW_RETURN_IF_FAILED(made->begin());
    (*known)[mapping->data()] = made;
    *found = std::move(made);
    return {};
  }

 private:
  std::shared_ptr<Mapping> mapping_;
  bool registered_ = false;
};

Status Control::create(const BackendInit& init, uint64_t tag, std::unique_ptr<Control>* control) {
  std::unique_ptr<Control> made(new Control);
  made->bootstrap_ = init.bootstrap;
  made->members_.assign(init.members.begin(), init.members.end());
  made->me_ = init.context->me;
  SharedMemory memory;
  TW_RETURN_IF_FAILED(share_memory(
      *init.bootstrap, init.members, tag, init.deadline, kPageBytes, false, [](std::byte*) {}, "", &memory));
  made->pages_ = std::move(memory.by_rank);
  for (const auto& page : made->pages_) {
    TW_RETURN_IF_FAILED(made->add_page(page));
  }
  *control = std::move(made);
  return {};
}

Status Control::add_page(const std::shared_ptr<Mapping>& page) {
  std::shared_ptr<Registered> registered;
  TW_RETURN_IF_FAILED(Registered::find(page, &registered));
  registered_.push_back(std::move(registered));
  void* pointer = nullptr;
  TW_CUDA(cudaHostGetDevicePointer(&pointer, page->data(), 0));
  on_device_.push_back(static_cast<ControlPage*>(pointer));
  return {};
}

Status Control::create_apart(const BackendInit& init, std::unique_ptr<Control>* control) {
  std::unique_ptr<Control> made(new Control);
  made->bootstrap_ = init.bootstrap;
  made->members_.assign(init.members.begin(), init.members.end());
  made->me_ = init.context->me;
  made->apart_ = true;
  made->staged_ = init.carrier != nullptr;
  made->tag_ = init.tag;
  made->first_step_ = init.context->first_step;
  made->watched_.resize(static_cast<size_t>(init.context->map.shape().channels));
  void* const memory = ::mmap(nullptr, kPageBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return fail_errno("cannot map a control page");
  const auto page = std::make_shared<Mapping>(static_cast<std::byte*>(memory), kPageBytes);
  made->pages_.assign(made->members_.size(), page);
  for (size_t rank = 0; rank < made->members_.size(); ++rank) TW_RETURN_IF_FAILED(made->add_page(page));
  *control = std::move(made);
  return {};
}

void Control::on_stop(std::function<void()> stop) {
  stop_ = std::move(stop);
  watcher_ = std::thread([this] { watch(); });
}

Control::~Control() { end_watch(); }

void Control::end_watch() {
  if (!watcher_.joinable()) return;
  {
    const std::lock_guard lock(mutex_);
    ending_ = true;
  }
  ended_.notify_all();
  watcher_.join();
}

// Looks after the peers. Nobody but this thread sees that a peer's process has ended: a kernel cannot.
void Control::watch() {
  std::unique_lock lock(mutex_);
  bool over = false;
  while (!ended_.wait_for(lock, kLook, [this] { return ending_; })) {
    if (apart_) listen(lock);
    if (asking_ != nullptr) asking_->answer();
    if (over) continue;
    for (int rank = 0; rank < static_cast<int>(members_.size()) && dead() < 0; ++rank) {
      if (bootstrap_->alive(members_[rank])) continue;
      if (ended_.wait_for(lock, kLastWords, [this] { return ending_; })) return;
      if (apart_) listen(lock);  // what it said before its end lies in its connection, not in a page
      if (ending_) return;
      dead_.store(rank, std::memory_order_release);
      stop();
    }
    if (dead() < 0 && find_abort().kind != 0) {
      stop();
      over = true;
    }
    over = over || dead() >= 0;
    if (!over && asking_ != nullptr) ask(lock);
    if (over && !apart_) return;  // where ranks share no memory, this thread goes on: survivors hear by it who has left
  }
}

void Control::stop() {
  std::atomic_ref(page(me_).stop).store(1, std::memory_order_release);
  if (stop_) stop_();
}

void Control::announce_abort(AbortSignal reason) {
  for (int rank = 0; rank < static_cast<int>(pages_.size()); ++rank) {
    std::atomic_ref(page(rank).abort[me_]).store(pack(reason), std::memory_order_release);
    if (reason.kind != 0) std::atomic_ref(page(rank).stop).store(1, std::memory_order_release);
  }
  if (apart_) tell(reason);
  if (reason.kind != 0 && stop_) stop_();
}

AbortSignal Control::abort_of(int writer) const { return unpack_abort(load(page(me_).abort[writer])); }

AbortSignal Control::find_abort() const {
  for (int writer = 0; writer < static_cast<int>(pages_.size()); ++writer) {
    const AbortSignal signal = abort_of(writer);
    if (signal.kind != 0) return signal;
  }
  return {};
}

bool Control::take(const Report& from, uint32_t* seen, Report* to) {
  const uint32_t serial = std::atomic_ref(const_cast<uint32_t&>(from.serial)).load(std::memory_order_acquire);
  if (serial == *seen) return false;
  std::memcpy(to, &from, sizeof *to);
  // It was overwritten meanwhile: the next look finds it whole.
  if (std::atomic_ref(const_cast<uint32_t&>(from.serial)).load(std::memory_order_acquire) != serial) return false;
  *seen = serial;
  return true;
}

bool Control::stopped(Report* report) const {
  uint32_t none = 0;
  return take(page(me_).stopped, &none, report);
}

bool Control::next_failure(Report* report) {
  if (asking_ != nullptr && page(me_).failure.result == twTimeout) await_verdict();
  return take(page(me_).failure, &failures_seen_, report) || take(page(me_).late, &late_seen_, report);
}
bool Control::next_call(Report* report) { return take(page(me_).call, &calls_seen_, report); }
bool Control::next_bad_id(Report* report) { return take(page(me_).bad_id, &bad_ids_seen_, report); }

}  // namespace tw::cuda
