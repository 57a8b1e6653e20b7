#include "cpu/window.h"

#include <sched.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <map>
#include <mutex>

namespace tw::cpu {
namespace {

Status map_memory(int fd, uint64_t bytes, std::shared_ptr<Mapping>* mapping) {
  void* const data = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (data == MAP_FAILED) return fail_errno("cannot map a window of %s", bytes_text(bytes).c_str());
  *mapping = std::make_shared<Mapping>(static_cast<std::byte*>(data), bytes);
  return {};
}

Status make_memfd(uint64_t bytes, Fd* fd) {
  *fd = Fd(::memfd_create("tokenway-window", MFD_CLOEXEC));
  if (!*fd) return fail_errno("cannot create a memfd");
  if (::ftruncate(fd->get(), static_cast<off_t>(bytes)) != 0) {
    return fail_errno("cannot give a window %s", bytes_text(bytes).c_str());
  }
  return {};
}

// A window as it is born: zero, and every word at the first step, so that nothing has arrived yet whatever the first
// step is.
void prepare(const Context& context, std::byte* window) {
  const WindowMap& map = context.map;
  for (int lane = 0; lane < map.shape().lanes; ++lane) {
    for (int bank = 0; bank < 2; ++bank) {
      for (int source = 0; source < map.shape().ranks; ++source) {
        *reinterpret_cast<uint64_t*>(window + map.word(lane, bank, source)) =
            pack({context.first_step, Mode::kNone, 0});
      }
    }
  }
}

// Windows of this process that its other ranks may take, by number: a number that has gone is found missing, where a
// pointer would dangle.
class LocalWindows {
 public:
  uint64_t add(const std::shared_ptr<Mapping>& window) {
    const std::lock_guard lock(mutex_);
    std::erase_if(windows_, [](const auto& entry) { return entry.second.expired(); });
    windows_[++last_] = window;
    return last_;
  }
  std::shared_ptr<Mapping> find(uint64_t number) {
    const std::lock_guard lock(mutex_);
    const auto found = windows_.find(number);
    return found == windows_.end() ? nullptr : found->second.lock();
  }

 private:
  std::mutex mutex_;
  std::map<uint64_t, std::weak_ptr<Mapping>> windows_;
  uint64_t last_ = 0;
};

LocalWindows& local_windows() {
  static LocalWindows windows;
  return windows;
}

cpu_set_t usable_cores() {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  ::sched_getaffinity(0, sizeof cores, &cores);
  return cores;
}

Status take_window(const BackendInit& init, int member, const Parcel& parcel, std::shared_ptr<Mapping>* window) {
  if (init.bootstrap->in_process()) {
    *window = local_windows().find(Unpacker(parcel.bytes).get<uint64_t>());
    return *window != nullptr ? Status{} : fail(twSystemError, "rank %d could not give its window", member);
  }
  struct stat size {};
  if (!parcel.fd || ::fstat(parcel.fd.get(), &size) != 0) {
    return fail(twSystemError, "rank %d could not give its window", member);
  }
  const uint64_t bytes = init.context->map.bytes();
  if (static_cast<uint64_t>(size.st_size) != bytes) {
    return fail(twInternalError, "the window of rank %d has %lld bytes, not %llu", member,
                static_cast<long long>(size.st_size), static_cast<unsigned long long>(bytes));
  }
  return map_memory(parcel.fd.get(), bytes, window);
}

}  // namespace

Mapping::~Mapping() { ::munmap(data_, bytes_); }

Status map_windows(const BackendInit& init, Windows* windows) {
  const Context& context = *init.context;
  Parcel mine;
  std::shared_ptr<Mapping> own;
  Status made = make_memfd(context.map.bytes(), &mine.fd);
  if (made.ok()) made = map_memory(mine.fd.get(), context.map.bytes(), &own);
  if (made.ok()) {
    prepare(context, own->data());
    const uint64_t number = init.bootstrap->in_process() ? local_windows().add(own) : 0;
    const cpu_set_t cores = usable_cores();
    mine.bytes = Packer().add(number).add(cores).take();
  } else {
    mine.fd.reset();  // the others must not wait for it
  }
  std::vector<Parcel> all;
  Status met = gather(*init.bootstrap, init.members, init.tag, mine, init.deadline, "exchanging windows", &all);
  TW_RETURN_IF_FAILED(std::move(made));
  TW_RETURN_IF_FAILED(std::move(met));
  windows->by_rank.resize(all.size());
  cpu_set_t together;
  CPU_ZERO(&together);
  for (size_t rank = 0; rank < all.size(); ++rank) {
    const bool self = static_cast<int>(rank) == context.me;
    std::shared_ptr<Mapping>& window = windows->by_rank[rank];
    if (self) window = own;
    if (!self) TW_RETURN_IF_FAILED(take_window(init, init.members[rank], all[rank], &window));
    Unpacker reader(all[rank].bytes);
    reader.get<uint64_t>();
    const auto cores = reader.get<cpu_set_t>();
    CPU_OR(&together, &together, &cores);
  }
  windows->cores = CPU_COUNT(&together);
  return {};
}

}  // namespace tw::cpu
