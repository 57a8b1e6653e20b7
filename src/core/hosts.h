// The hosts of a comm whose ranks are on several: which rank is on which, how those of one host hand each other memory,
// and how an engine between hosts is made (net/engine.h). src/api/fabric.cc fills it; src/cpu/fabric_creation.cc makes
// a group's transport of it. All ranks must have the same `of`.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "bootstrap/bootstrap.h"
#include "layout/inbox_map.h"
#include "layout/topology.h"

namespace tw {

namespace net {
class Engine;
struct Meeting;
}  // namespace net

struct Hosts {
  std::vector<int> of;               // [comm's ranks] the host of each, any numbers
  std::vector<int> local;            // [comm's ranks] of those of this host: its rank in `among`
  std::unique_ptr<Bootstrap> among;  // the ranks of this host alone; NULL: the comm's own carries descriptors
  twCrossing_t crossing = twCrossFaster;
  bool reads_mates = true;  // of devices: whether each sees in order what a network writes to the others of its host
  // Connects the ranks of a group. Collective among the meeting's members.
  std::function<Status(const net::Meeting&, std::unique_ptr<net::Engine>*)> connect;

  // Those of them that are of this host, as ranks of `among`.
  std::vector<int> mates(std::span<const int> members) const {
    std::vector<int> found;
    for (const int member : members) {
      if (local[static_cast<size_t>(member)] >= 0) found.push_back(local[static_cast<size_t>(member)]);
    }
    return found;
  }
  // Whether rows may go to each host of devices once, to be read there by all its ranks.
  bool crosses_once() const { return crossing != twCrossPerRank && reads_mates; }
  // Of a group between devices; `folds`: its domains are hosts.
  InboxUses uses_of_inboxes(bool folds) const { return {crosses_once(), folds && crossing != twCrossPerRank}; }
  // Of a group's ranks, which are these of the comm.
  Topology topology(std::span<const int> members) const {
    std::vector<int> names;
    for (const int member : members) names.push_back(of[static_cast<size_t>(member)]);
    return Topology::make(names);
  }
};

}  // namespace tw
