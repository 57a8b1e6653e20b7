// Makes and maps memory that ranks share (bootstrap/shared_memory.h): memfds whose descriptors travel in parcels, or,
// within one process, mappings by number. Memory is filled before it is given away; a rank that could not make its own
// still meets the others and says so. A peer's memory of another size than this rank's map is refused, or accesses
// beyond it would kill the process.
#include "bootstrap/shared_memory.h"

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>

#include "bootstrap/descriptors.h"
#include "bootstrap/local_registry.h"

namespace tw {
namespace {

Status map_memory(int fd, uint64_t bytes, bool grows, std::shared_ptr<Mapping>* mapping) {
  TW_RETURN_IF_FAILED(Mapping::reserve(bytes, grows, mapping));
  return (*mapping)->map(fd, 0, bytes);
}

Status make_memfd(uint64_t bytes, int ranks, std::shared_ptr<const Fd>* made) {
  auto fd = std::make_shared<const Fd>(::memfd_create("tokenway-window", MFD_CLOEXEC));
  if (!*fd) return fail_to_open(ranks, "create a window's memfd");
  *made = fd;
  if (::ftruncate(fd->get(), static_cast<off_t>(bytes)) != 0) {
    return fail_errno("cannot give a window {}", bytes_text(bytes));
  }
  return {};
}

LocalRegistry<Mapping>& local_memory() {
  static LocalRegistry<Mapping> memory;
  return memory;
}

// Checks the memfd that a member has given.
Status check_memfd(const Bootstrap& bootstrap, int member, const Parcel& parcel, uint64_t bytes) {
  struct stat size {};
  if (parcel.fd != nullptr && !*parcel.fd) return fail_to_receive(bootstrap.size(), "take a peer's window");
  if (parcel.fd == nullptr || ::fstat(parcel.fd->get(), &size) != 0) {
    return fail(twSystemError, "rank {} could not give its window", member);
  }
  if (static_cast<uint64_t>(size.st_size) != bytes) {
    return fail(twInternalError, "the window of rank {} has {} bytes, not {}", member, size.st_size, bytes);
  }
  return {};
}

Status take(const Bootstrap& bootstrap, int member, uint64_t number, const Parcel& parcel, uint64_t bytes, bool grows,
            std::shared_ptr<Mapping>* mapping) {
  if (bootstrap.in_process()) {
    *mapping = local_memory().find(number);
    return *mapping != nullptr ? Status{} : fail(twSystemError, "rank {} could not give its window", member);
  }
  TW_RETURN_IF_FAILED(check_memfd(bootstrap, member, parcel, bytes));
  return map_memory(parcel.fd->get(), bytes, grows, mapping);
}

}  // namespace

Mapping::~Mapping() { ::munmap(data_, bytes_); }

Status Mapping::reserve(uint64_t bytes, bool grows, std::shared_ptr<Mapping>* mapping) {
  // A process has 128 TiB of addresses. A small window may become any: decoding begins with a token or two.
  constexpr uint64_t kTimes = 64;
  constexpr uint64_t kLeast = uint64_t{4} << 30;
  const uint64_t room = grows && bytes <= UINT64_MAX / 2 / kTimes ? std::max(kTimes * bytes, kLeast) : bytes;
  for (const uint64_t wanted : {room, bytes}) {
    void* const data = ::mmap(nullptr, wanted, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (data == MAP_FAILED) continue;
    *mapping = std::make_shared<Mapping>(static_cast<std::byte*>(data), wanted);
    return {};
  }
  return fail_errno("cannot map a window of {}", bytes_text(bytes));
}

Status Mapping::map(int fd, uint64_t at, uint64_t bytes) const {
  if (at > bytes_ || bytes > bytes_ - at) {
    return fail(twOutOfMemory, "a window has addresses for {} and needs {}; make a group of this size",
                bytes_text(bytes_), bytes_text(at + bytes));
  }
  const int flags = MAP_FIXED | (fd < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED);
  if (::mmap(data_ + at, bytes, PROT_READ | PROT_WRITE, flags, fd, 0) != MAP_FAILED) return {};
  return fail_errno("cannot map a window of {}", bytes_text(bytes));
}

Status grow_memory(Bootstrap& bootstrap, std::span<const int> members, uint64_t tag, TimePoint deadline, uint64_t at,
                   uint64_t bytes, const std::vector<std::shared_ptr<Mapping>>& by_rank) {
  Parcel mine;
  const auto me = static_cast<size_t>(std::find(members.begin(), members.end(), bootstrap.rank()) - members.begin());
  Status made = make_memfd(bytes, bootstrap.size(), &mine.fd);
  if (made.ok()) made = by_rank[me]->map(mine.fd->get(), at, bytes);
  if (!made.ok() || bootstrap.in_process()) mine.fd.reset();
  mine.bytes = pack_result(made).take();
  std::vector<Parcel> all;
  Status met = gather(bootstrap, members, tag, mine, deadline, "exchanging windows", &all);
  TW_RETURN_IF_FAILED(std::move(made));
  TW_RETURN_IF_FAILED(std::move(met));
  for (size_t rank = 0; rank < all.size(); ++rank) {
    Unpacker reader(all[rank].bytes);
    TW_RETURN_IF_FAILED(read_result(members[rank], reader));
    if (rank == me || bootstrap.in_process()) continue;  // ranks of one process have one mapping
    TW_RETURN_IF_FAILED(check_memfd(bootstrap, members[rank], all[rank], bytes));
    TW_RETURN_IF_FAILED(by_rank[rank]->map(all[rank].fd->get(), at, bytes));
  }
  return {};
}

Status share_memory(Bootstrap& bootstrap, std::span<const int> members, uint64_t tag, TimePoint deadline,
                    uint64_t bytes, bool grows, const std::function<void(std::byte*)>& fill, const std::string& note,
                    SharedMemory* memory, const Status& ready) {
  Parcel mine;
  std::shared_ptr<Mapping> own;
  Status made = ready.ok() ? make_memfd(bytes, bootstrap.size(), &mine.fd) : ready;
  if (made.ok()) made = map_memory(mine.fd->get(), bytes, grows, &own);
  uint64_t number = 0;
  if (made.ok()) {
    fill(own->data());
    if (bootstrap.in_process()) number = local_memory().add(own);
  } else {
    mine.fd.reset();  // the others hear why there is none
  }
  mine.bytes = pack_result(made).add(number).add_bytes(note.data(), note.size()).take();
  std::vector<Parcel> all;
  Status met = gather(bootstrap, members, tag, mine, deadline, "exchanging windows", &all);
  TW_RETURN_IF_FAILED(std::move(made));
  TW_RETURN_IF_FAILED(std::move(met));
  memory->by_rank.resize(all.size());
  for (size_t rank = 0; rank < all.size(); ++rank) {
    Unpacker reader(all[rank].bytes);
    TW_RETURN_IF_FAILED(read_result(members[rank], reader));
    const auto theirs = reader.get<uint64_t>();
    memory->notes.push_back(reader.get_bytes());
    std::shared_ptr<Mapping>& mapping = memory->by_rank[rank];
    if (members[rank] == bootstrap.rank()) {
      mapping = own;
    } else {
      TW_RETURN_IF_FAILED(take(bootstrap, members[rank], theirs, all[rank], bytes, grows, &mapping));
    }
  }
  return {};
}

}  // namespace tw
