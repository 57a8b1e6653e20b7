// Finds a common address for a mesh of Unix sockets: where the caller can already gather bytes, rank 0 proposes a
// random one and tells it by the caller's allgather. Takes that function, gives the address, and refuses ranks on
// several hosts (twUnsupported). A rank that has trouble says so in its card, because its peers would otherwise wait
// for it.
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <random>

#include "bootstrap/bootstrap.h"
#include "bootstrap/descriptors.h"
#include "bootstrap/host.h"
#include "core/interrupt.h"

namespace tw {
namespace {

struct Card {
  char host[48] = {};      // this boot of this host
  char address[40] = {};   // what rank 0 proposes
  char trouble[300] = {};  // why this rank cannot be met; "" if it can
};

}  // namespace

Status name_boot(int ranks, char (&name)[48]) {
  name[0] = 0;
  if (std::FILE* const file = std::fopen("/proc/sys/kernel/random/boot_id", "re")) {
    if (std::fscanf(file, "%47s", name) != 1) name[0] = 0;
    std::fclose(file);
  } else if (errno == EMFILE || errno == ENFILE) {  // any other name would make one host look like two
    return fail_to_open(ranks, "read this host's boot_id");
  }
  if (name[0] == 0) ::gethostname(name, sizeof name - 1);
  return {};
}

Status agree_on_address(int rank, int size, const std::function<int(const void*, void*, size_t)>& allgather,
                        std::string* address) {
  Card mine;
  raise_descriptor_limit();
  Status named = name_boot(size, mine.host);
  std::snprintf(mine.trouble, sizeof mine.trouble, "%s", named.text().c_str());
  std::random_device random;
  std::snprintf(mine.address, sizeof mine.address, "%08x%08x%08x%08x", random(), random(), random(), random());
  std::vector<Card> all(size);
  const int result = allgather(&mine, all.data(), sizeof mine);
  if (result != 0 && is_interrupted_now()) {
    return fail(twInterrupted, "connecting was interrupted in {}", Argument("config.allgather"));
  }
  if (result != 0) return fail(twSystemError, "{} returned {}; it must return 0", Argument("config.allgather"), result);
  if (std::memcmp(&all[rank], &mine, sizeof mine) != 0) {
    return fail(twSystemError, "{} returned 0, but what rank {} gave is not at its place", Argument("config.allgather"),
                rank);
  }
  TW_RETURN_IF_FAILED(std::move(named));
  for (int other = 0; other < size; ++other) {
    if (all[other].trouble[0] != 0) return fail(twPeerRefused, "rank {}: {}", other, all[other].trouble);
    if (std::memcmp(all[other].host, all[rank].host, sizeof mine.host) == 0) continue;
    return fail(twUnsupported, "rank {} and rank {} run on different hosts; ranks of a comm must share one", rank,
                other);
  }
  address->assign(all[0].address, ::strnlen(all[0].address, sizeof mine.address));
  return {};
}

}  // namespace tw
