// The mesh needs a common address; where the caller can already gather bytes, it comes from there.
#include <unistd.h>

#include <array>
#include <cstdio>
#include <cstring>
#include <random>

#include "bootstrap/bootstrap.h"
#include "core/interrupt.h"

namespace tw {
namespace {

struct Card {
  char host[48] = {};     // this boot of this host
  char address[40] = {};  // what rank 0 proposes
};

// Names this boot of this host: what Unix sockets need ranks to have in common.
void name_host(Card* card) {
  if (std::FILE* const file = std::fopen("/proc/sys/kernel/random/boot_id", "r")) {
    if (std::fscanf(file, "%47s", card->host) != 1) card->host[0] = 0;
    std::fclose(file);
  }
  if (card->host[0] == 0) ::gethostname(card->host, sizeof card->host - 1);
}

}  // namespace

Status agree_on_address(int rank, int size, const std::function<int(const void*, void*, size_t)>& allgather,
                        std::string* address) {
  Card mine;
  name_host(&mine);
  std::random_device random;
  std::snprintf(mine.address, sizeof mine.address, "%08x%08x%08x%08x", random(), random(), random(), random());
  std::vector<Card> all(size);
  const int result = allgather(&mine, all.data(), sizeof mine);
  if (result != 0 && is_interrupted_now()) return fail(twInterrupted, "connecting was interrupted in config.allgather");
  if (result != 0) return fail(twSystemError, "config.allgather returned %d; it must return 0", result);
  if (std::memcmp(&all[rank], &mine, sizeof mine) != 0) {
    return fail(twSystemError, "config.allgather returned 0, but what rank %d gave is not at its place", rank);
  }
  for (int other = 0; other < size; ++other) {
    if (std::memcmp(all[other].host, all[rank].host, sizeof mine.host) == 0) continue;
    return fail(twUnsupported, "rank %d and rank %d run on different hosts; ranks of a comm must share one", rank,
                other);
  }
  address->assign(all[0].address, ::strnlen(all[0].address, sizeof mine.address));
  return {};
}

}  // namespace tw
