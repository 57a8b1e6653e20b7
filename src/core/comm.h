// A comm: the ranks that take part, their bootstrap, device and environment. Groups are made on it. `occasions` numbers
// the collective calls outside of steps: ranks that count differently meet in different calls (twCallMismatch), or wait
// for each other until the timeout.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "bootstrap/bootstrap.h"
#include "core/carrier.h"
#include "core/env.h"
#include "core/hosts.h"
#include "core/occupied.h"
#include "core/quarantine.h"

struct twComm : tw::Quarantined<twComm> {
  std::unique_ptr<tw::Bootstrap> bootstrap;
  tw::Environment environment{};
  int32_t timeout_ms = 0;                // timeout of meetings of all ranks
  int device = -1;                       // this rank's device; -1: the CPU
  std::unique_ptr<tw::Carrier> carrier;  // a portable comm's; else NULL
  std::unique_ptr<tw::Hosts> hosts;      // of a comm between hosts; else NULL
  std::vector<int> devices;              // those of all ranks, where they are in this process
  // Collective calls so far: the high part of a bootstrap tag, the same on all ranks.
  std::atomic<uint64_t> occasions = 2;
  std::atomic<int> groups = 0;  // alive
  tw::Occupied occupied;        // taken by a call in which its ranks meet

  // Tells members that this rank takes no further part in a call, in all meetings that such a call may have.
  void give_up(std::span<const int> members, uint64_t occasion) {
    bootstrap->give_up(members, occasion);
    if (hosts != nullptr && hosts->among != nullptr) hosts->among->give_up(hosts->mates(members), occasion);
  }
  // Whether ranks are on devices of several hosts, whose kernels post what goes between them.
  bool posts() const { return hosts != nullptr && device >= 0; }
  // Whether rows travel in blocks: by a carrier, or by posts.
  bool stages() const { return carrier != nullptr || posts(); }
  // A range of 2^16 tags for one collective call.
  uint64_t next_tags() { return occasions++ << 16; }
};
