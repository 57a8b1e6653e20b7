// The mesh over TCP, for ranks on several hosts or in several network namespaces. Each rank listens at a port of its
// own, on all addresses, and tells the others where by the caller's allgather (a TcpCard). A secret in the cards keeps
// other programs out; nothing is encrypted. Ranks that share a network namespace use loopback: if `domain` took two
// hosts for one, they would never connect.
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <random>

#include "bootstrap/descriptors.h"
#include "bootstrap/host.h"
#include "bootstrap/socket.h"
#include "core/interrupt.h"

namespace tw {
namespace {

constexpr int kMostAddresses = 8;

struct Address {
  uint8_t bytes[16] = {};  // IPv6, or IPv4 mapped into it
  uint32_t scope = 0;
};

// What a rank tells the others of itself. `domain` names this boot of this host and this network namespace: "localhost"
// is the same to all that share it.
struct TcpCard {
  char domain[96] = {};     // this host and network namespace
  char processes[40] = {};  // this namespace of process ids
  int32_t process = 0;
  char note[64] = {};
  char trouble[300] = {};  // why this rank cannot be met; "" if it can
  uint64_t secret = 0;     // rank 0's is the one that is used
  uint16_t port = 0;
  int32_t addresses = 0;
  Address at[kMostAddresses];
};

Status name_domain(int size, TcpCard* card) {
  char boot[kBootBytes] = "";
  TW_RETURN_IF_FAILED(name_boot(size, boot));
  char space[40] = "";
  name_network(space);
  std::snprintf(card->domain, sizeof card->domain, "%s %s", boot, space);
  if (::readlink("/proc/self/ns/pid", card->processes, sizeof card->processes - 1) < 0) return {};
  card->process = static_cast<int32_t>(::getpid());
  return {};
}

Address loopback() {
  Address address;
  address.bytes[10] = address.bytes[11] = 0xff;
  address.bytes[12] = 127;
  address.bytes[15] = 1;
  return address;
}

// Lists addresses of interfaces that are up, IPv4 first, without loopback.
Status list_addresses(int size, TcpCard* card) {
  ifaddrs* all = nullptr;
  if (::getifaddrs(&all) != 0) return descriptor_shortage() != 0 ? fail_to_receive(size, "list addresses") : Status{};
  for (const int family : {AF_INET, AF_INET6}) {
    for (const ifaddrs* each = all; each != nullptr && card->addresses < kMostAddresses; each = each->ifa_next) {
      if (each->ifa_addr == nullptr || each->ifa_addr->sa_family != family) continue;
      if ((each->ifa_flags & IFF_UP) == 0 || (each->ifa_flags & IFF_LOOPBACK) != 0) continue;
      Address& address = card->at[card->addresses];
      if (family == AF_INET) {
        address = loopback();
        std::memcpy(address.bytes + 12, &reinterpret_cast<const sockaddr_in*>(each->ifa_addr)->sin_addr, 4);
      } else {
        const auto* const from = reinterpret_cast<const sockaddr_in6*>(each->ifa_addr);
        if (IN6_IS_ADDR_LINKLOCAL(&from->sin6_addr)) continue;  // its scope is a number that only this host knows
        std::memcpy(address.bytes, &from->sin6_addr, sizeof address.bytes);
      }
      ++card->addresses;
    }
  }
  ::freeifaddrs(all);
  return {};
}

sockaddr_in6 socket_address(const Address& address, uint16_t port) {
  sockaddr_in6 at{};
  at.sin6_family = AF_INET6;
  at.sin6_port = htons(port);
  std::memcpy(&at.sin6_addr, address.bytes, sizeof address.bytes);
  return at;
}

// An address for a socket. A host may have no IPv6 at all: then it is IPv4, for the same addresses.
struct SocketAddress {
  sockaddr_storage storage{};
  socklen_t length = 0;

  SocketAddress(bool v6, const sockaddr_in6& from) {
    if (v6) {
      std::memcpy(&storage, &from, length = sizeof from);
      return;
    }
    sockaddr_in v4{};
    v4.sin_family = AF_INET;
    v4.sin_port = from.sin6_port;
    std::memcpy(&v4.sin_addr, from.sin6_addr.s6_addr + 12, 4);
    std::memcpy(&storage, &v4, length = sizeof v4);
  }
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
};

Fd make_socket(bool* v6) {
  Fd socket(::socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  *v6 = static_cast<bool>(socket);
  if (!*v6) return Fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  const int both = 0;
  ::setsockopt(socket.get(), IPPROTO_IPV6, IPV6_V6ONLY, &both, sizeof both);
  return socket;
}

// Makes small frames not wait for each other's acknowledgement.
void send_at_once(int socket) {
  const int on = 1;
  ::setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
}

class TcpWay : public Way {
 public:
  Status open(int size) {
    bool v6 = false;
    listener_ = make_socket(&v6);
    if (!listener_) return fail_to_open(size, "make a TCP socket");
    const SocketAddress any(v6, socket_address(v6 ? Address{} : any4(), 0));
    if (::bind(listener_.get(), any.get(), any.length) != 0) return fail_errno("cannot bind a TCP socket");
    if (::listen(listener_.get(), size) != 0) return fail_errno("cannot listen");
    sockaddr_storage at{};
    socklen_t length = sizeof at;
    if (::getsockname(listener_.get(), reinterpret_cast<sockaddr*>(&at), &length) != 0) {
      return fail_errno("cannot ask for a socket's port");
    }
    port_ = ntohs(v6 ? reinterpret_cast<sockaddr_in6&>(at).sin6_port : reinterpret_cast<sockaddr_in&>(at).sin_port);
    return {};
  }
  uint16_t port() const { return port_; }
  void know(std::vector<TcpCard> cards, int me) {
    cards_ = std::move(cards);
    me_ = me;
  }

  Status listen(int, int, TimePoint, Fd* listener) override {
    *listener = std::move(listener_);
    return {};
  }

  Status dial(int peer, int attempt, Fd* socket) override {
    const TcpCard& card = cards_[peer];
    std::vector<Address> addresses(card.at, card.at + card.addresses);
    if (std::strcmp(card.domain, cards_[me_].domain) == 0) addresses = {loopback()};
    if (addresses.empty()) {
      return fail(twUnsupported, "rank {} has no network interface that is up, and is not where rank {} is", peer, me_);
    }
    bool v6 = false;
    *socket = make_socket(&v6);
    if (!*socket) return fail_to_open(static_cast<int>(cards_.size()), "make a TCP socket");
    const SocketAddress to(v6, socket_address(addresses[attempt % addresses.size()], card.port));
    if (::connect(socket->get(), to.get(), to.length) != 0 && errno != EINPROGRESS) socket->reset();
    return {};
  }

  Status check(int socket, int* pid) override {
    *pid = 0;
    send_at_once(socket);
    return {};
  }
  // Ranks of one host see each other's end even where a forked child holds the connection open.
  int process(int peer) const override {
    const TcpCard& mine = cards_[me_];
    const TcpCard& theirs = cards_[peer];
    const auto boot = std::strcspn(mine.domain, " ");
    const bool together = boot == std::strcspn(theirs.domain, " ") &&
                          std::strncmp(mine.domain, theirs.domain, boot) == 0 &&
                          std::strcmp(mine.processes, theirs.processes) == 0;
    return together ? theirs.process : 0;
  }
  uint64_t secret() const override { return cards_[0].secret; }
  bool carries_descriptors() const override { return false; }

 private:
  static Address any4() {
    Address address = loopback();
    std::memset(address.bytes + 12, 0, 4);
    return address;
  }

  Fd listener_;
  uint16_t port_ = 0;
  int me_ = 0;
  std::vector<TcpCard> cards_;
};

}  // namespace

Status connect_tcp(int rank, int size, const std::function<int(const void*, void*, size_t)>& allgather,
                   const std::string& note, const Sentence& what, TimePoint deadline,
                   std::unique_ptr<Bootstrap>* bootstrap) {
  auto way = std::make_unique<TcpWay>();
  raise_descriptor_limit();
  Status opened = way->open(size);
  TcpCard mine;
  if (opened.ok()) opened = name_domain(size, &mine);
  if (opened.ok()) opened = list_addresses(size, &mine);
  std::snprintf(mine.trouble, sizeof mine.trouble, "%s", opened.text().c_str());
  std::snprintf(mine.note, sizeof mine.note, "%s", note.c_str());
  std::random_device random;
  mine.secret = static_cast<uint64_t>(random()) << 32 | random() | 1;
  mine.port = way->port();
  std::vector<TcpCard> cards(size);
  Status met = gather_bytes(rank, allgather, &mine, cards.data(), sizeof mine);
  TW_RETURN_IF_FAILED(std::move(opened));
  TW_RETURN_IF_FAILED(std::move(met));
  for (int other = 0; other < size; ++other) {
    if (cards[other].trouble[0] != 0) return fail(twPeerRefused, "rank {}: {}", other, cards[other].trouble);
    if (std::strcmp(cards[other].note, cards[0].note) == 0) continue;
    return fail(twConfigMismatch, "{} differ: rank 0 has {}, rank {} has {}", what, cards[0].note, other,
                cards[other].note);
  }
  way->know(std::move(cards), rank);
  return connect_over(std::move(way), rank, size, deadline, bootstrap);
}

}  // namespace tw
