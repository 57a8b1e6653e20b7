// Finds a common address for a mesh of Unix sockets: where the caller can already gather bytes, rank 0 proposes a
// random one and tells it by the caller's allgather. Takes that function, gives the address, and refuses ranks on
// several hosts (twUnsupported), or says that they are. A rank that has trouble says so in its card, because its peers
// would otherwise wait for it.
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
  char host[kBootBytes] = {};  // this boot of this host
  char network[40] = {};       // this network namespace
  char address[40] = {};       // what rank 0 proposes
  char trouble[300] = {};      // why this rank cannot be met; "" if it can
};

}  // namespace

Status name_boot(int ranks, char (&name)[kBootBytes]) {
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

void name_network(char (&name)[40]) {
  const ssize_t length = ::readlink("/proc/self/ns/net", name, sizeof name - 1);
  name[length < 0 ? 0 : length] = 0;
}

Status gather_bytes(int rank, const std::function<int(const void*, void*, size_t)>& allgather, const void* mine,
                    void* all, size_t bytes) {
  const int result = allgather(mine, all, bytes);
  if (result != 0 && is_interrupted_now()) {
    return fail(twInterrupted, "connecting was interrupted in {}", Argument("config.allgather"));
  }
  if (result != 0) return fail(twSystemError, "{} returned {}; it must return 0", Argument("config.allgather"), result);
  if (std::memcmp(static_cast<const char*>(all) + bytes * static_cast<size_t>(rank), mine, bytes) == 0) return {};
  return fail(twSystemError, "{} returned 0, but what rank {} gave is not at its place", Argument("config.allgather"),
              rank);
}

namespace {

// Gathers the cards of all ranks; fails if one of them has trouble. `ready`: this rank's.
Status gather_cards(int rank, int size, const std::function<int(const void*, void*, size_t)>& allgather,
                    const Status& ready, std::vector<Card>* all) {
  Card mine;
  raise_descriptor_limit();
  Status named = name_boot(size, mine.host);
  if (!ready.ok()) named = ready;
  name_network(mine.network);
  std::snprintf(mine.trouble, sizeof mine.trouble, "%s", named.text().c_str());
  std::random_device random;
  std::snprintf(mine.address, sizeof mine.address, "%08x%08x%08x%08x", random(), random(), random(), random());
  all->resize(static_cast<size_t>(size));
  TW_RETURN_IF_FAILED(gather_bytes(rank, allgather, &mine, all->data(), sizeof mine));
  TW_RETURN_IF_FAILED(std::move(named));
  for (int other = 0; other < size; ++other) {
    const Card& card = (*all)[static_cast<size_t>(other)];
    if (card.trouble[0] != 0) return fail(twPeerRefused, "rank {}: {}", other, card.trouble);
  }
  return {};
}

bool same_host(const Card& a, const Card& b) {
  return std::memcmp(a.host, b.host, sizeof a.host) == 0 && std::memcmp(a.network, b.network, sizeof a.network) == 0;
}

std::string address_of(const Card& card) { return {card.address, ::strnlen(card.address, sizeof card.address)}; }

}  // namespace

Status agree_on_address(int rank, int size, const std::function<int(const void*, void*, size_t)>& allgather,
                        const Status& ready, std::string* address, Sentence* apart) {
  std::vector<Card> all;
  TW_RETURN_IF_FAILED(gather_cards(rank, size, allgather, ready, &all));
  // Compared with rank 0's, so that all ranks tell of the same two.
  for (int other = 1; other < size; ++other) {
    if (same_host(all[other], all[0])) continue;
    const bool host = std::memcmp(all[other].host, all[0].host, sizeof all[0].host) == 0;
    const Sentence where = host ? compose("rank 0 and rank {} run in different network namespaces of a host", other)
                                : compose("rank 0 and rank {} run on different hosts", other);
    if (apart == nullptr) return fail(twUnsupported, "{}; ranks of a comm must share one", where);
    *apart = where;
    address->clear();
    return {};
  }
  *address = address_of(all[0]);
  return {};
}

Status agree_on_hosts(int rank, int size, const std::function<int(const void*, void*, size_t)>& allgather,
                      int ranks_per_host, std::vector<int>* of, std::string* address) {
  std::vector<Card> all;
  TW_RETURN_IF_FAILED(gather_cards(rank, size, allgather, {}, &all));
  std::vector<int> first;  // the first rank of each host
  of->assign(static_cast<size_t>(size), 0);
  for (int other = 0; other < size; ++other) {
    int before = 0;  // ranks on the same machine
    int host = -1;   // that have made a host which is not full
    for (int earlier = 0; earlier < other; ++earlier) {
      if (!same_host(all[earlier], all[other])) continue;
      ++before;
      host = (*of)[earlier];
    }
    if (host < 0 || (ranks_per_host > 0 && before % ranks_per_host == 0)) {
      host = static_cast<int>(first.size());
      first.push_back(other);
    }
    (*of)[other] = host;
  }
  *address = address_of(all[static_cast<size_t>(first[static_cast<size_t>((*of)[rank])])]);
  return {};
}

}  // namespace tw
