// Topology: which ranks of a group are on one host, and who deals with whom between hosts (docs/PROTOCOL.md, "Between
// hosts"). It takes a host for each rank, and gives rails and rail peers. A rank's rail is its place among the ranks of
// its host; its rail peer on another host is the rank there with its rail, modulo the number of ranks there.
//
// All ranks must make it of the same hosts: a source puts its lists where it thinks that its rail peer reads them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

namespace tw {

struct Topology {
  std::vector<int> host;                // [N], numbered in the order of their first ranks
  std::vector<int> rail;                // [N]
  std::vector<std::vector<int>> ranks;  // [hosts] the ranks of each, ascending

  // names: of each rank's host, any numbers.
  static Topology make(std::span<const int> names) {
    Topology made;
    std::vector<int> known;
    for (size_t rank = 0; rank < names.size(); ++rank) {
      const auto host = static_cast<size_t>(std::ranges::find(known, names[rank]) - known.begin());
      if (host == known.size()) {
        known.push_back(names[rank]);
        made.ranks.emplace_back();
      }
      made.host.push_back(static_cast<int>(host));
      made.rail.push_back(static_cast<int>(made.ranks[host].size()));
      made.ranks[host].push_back(static_cast<int>(rank));
    }
    return made;
  }

  int hosts() const { return static_cast<int>(ranks.size()); }
  int size() const { return static_cast<int>(host.size()); }
  bool together(int a, int b) const { return host[a] == host[b]; }
  const std::vector<int>& mates(int rank) const { return ranks[host[rank]]; }

  // The rank of a host in whose memory the lists of a rank of another host lie.
  int rail_peer(int rank, int of_host) const { return ranks[of_host][rail[rank] % ranks[of_host].size()]; }
  // Which of the lists that lie there is this rank's.
  int list(int rank, int of_host) const {
    const int peer = rail_peer(rank, of_host);
    int before = 0;
    for (int other = 0; other < rank; ++other) {
      before += host[other] != of_host && rail_peer(other, of_host) == peer ? 1 : 0;
    }
    return before;
  }

  // Whether hosts have `size` ranks each, neighbours. 0: no.
  bool divides_into(int size) const {
    if (size == 0) return false;
    for (int rank = 0; rank < this->size(); ++rank) {
      if (host[rank] != rank / size) return false;
    }
    return std::ranges::all_of(ranks, [&](const auto& of_host) { return static_cast<int>(of_host.size()) == size; });
  }

  // The most ranks that a host has, the most lists that lie at one rank, and the most ranks that others have beside a
  // host's.
  int most_local() const {
    size_t most = 0;
    for (const auto& of_host : ranks) most = std::max(most, of_host.size());
    return static_cast<int>(most);
  }
  int most_lists() const {
    std::vector<int> lists(host.size());
    for (int rank = 0; rank < size(); ++rank) {
      for (int other = 0; other < hosts(); ++other) lists[rail_peer(rank, other)] += other != host[rank] ? 1 : 0;
    }
    return *std::ranges::max_element(lists);
  }
  int most_remote() const {
    size_t least = host.size();
    for (const auto& of_host : ranks) least = std::min(least, of_host.size());
    return size() - static_cast<int>(least);
  }
};

}  // namespace tw
