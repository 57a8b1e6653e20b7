// Makes and maps memory that ranks share (bootstrap/shared_memory.h): memfds whose descriptors travel in parcels, or,
// within one process, mappings by number. Memory is filled before it is given away; a rank that could not make its own
// still meets the others and says so. A peer's memory of another size than this rank's map is refused, or accesses
// beyond it would kill the process.
#include "bootstrap/shared_memory.h"

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "bootstrap/descriptors.h"
#include "bootstrap/local_registry.h"

namespace tw {
namespace {

Status map_memory(int fd, uint64_t bytes, std::shared_ptr<Mapping>* mapping) {
  void* const data = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (data == MAP_FAILED) return fail_errno("cannot map a window of {}", bytes_text(bytes));
  *mapping = std::make_shared<Mapping>(static_cast<std::byte*>(data), bytes);
  return {};
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

Status take(const Bootstrap& bootstrap, int member, uint64_t number, const Parcel& parcel, uint64_t bytes,
            std::shared_ptr<Mapping>* mapping) {
  if (bootstrap.in_process()) {
    *mapping = local_memory().find(number);
    return *mapping != nullptr ? Status{} : fail(twSystemError, "rank {} could not give its window", member);
  }
  struct stat size {};
  if (parcel.fd != nullptr && !*parcel.fd) return fail_to_receive(bootstrap.size(), "take a peer's window");
  if (parcel.fd == nullptr || ::fstat(parcel.fd->get(), &size) != 0) {
    return fail(twSystemError, "rank {} could not give its window", member);
  }
  if (static_cast<uint64_t>(size.st_size) != bytes) {
    return fail(twInternalError, "the window of rank {} has {} bytes, not {}", member, size.st_size, bytes);
  }
  return map_memory(parcel.fd->get(), bytes, mapping);
}

}  // namespace

Mapping::~Mapping() { ::munmap(data_, bytes_); }

Status share_memory(Bootstrap& bootstrap, std::span<const int> members, uint64_t tag, TimePoint deadline,
                    uint64_t bytes, const std::function<void(std::byte*)>& fill, const std::string& note,
                    SharedMemory* memory) {
  Parcel mine;
  std::shared_ptr<Mapping> own;
  Status made = make_memfd(bytes, bootstrap.size(), &mine.fd);
  if (made.ok()) made = map_memory(mine.fd->get(), bytes, &own);
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
      TW_RETURN_IF_FAILED(take(bootstrap, members[rank], theirs, all[rank], bytes, &mapping));
    }
  }
  return {};
}

}  // namespace tw
