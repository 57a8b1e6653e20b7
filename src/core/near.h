// Near: what a backend among the ranks of this host alone would be made with, of a group whose ranks are on several. It
// takes what the whole backend is made with, and gives that of the mates, who meet over a bootstrap of their own. It
// points into itself, so it stays where it was made.
#pragma once

#include <vector>

#include "core/hosts.h"
#include "core/make_backend.h"

namespace tw {

struct Near {
  BackendInit init;          // context: the whole group's
  std::vector<int> ranks;    // of the group
  std::vector<int> members;  // of the bootstrap that they meet over

  Near(const BackendInit& whole, const Topology& topology) : init(whole) {
    ranks = topology.mates(whole.context->me);
    const Hosts& hosts = *whole.hosts;
    if (hosts.among != nullptr) init.bootstrap = hosts.among.get();
    for (const int rank : ranks) {
      const int member = whole.members[static_cast<size_t>(rank)];
      members.push_back(hosts.among != nullptr ? hosts.local[static_cast<size_t>(member)] : member);
    }
    init.members = members;
  }
  Near(const Near&) = delete;
  Near& operator=(const Near&) = delete;
};

}  // namespace tw
