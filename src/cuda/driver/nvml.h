// What NVML tells of the way between two devices, of which this process may see one alone: NVML has all of a machine,
// whatever CUDA_VISIBLE_DEVICES says, and a container has those that it was given.
//
// find_link takes the UUIDs of this rank's device and of another, and gives twLinksNvml (NVLink joins them),
// twLinksOther (it does not) or twLinksTested (NVML is not here, or does not know the other device: only a test can
// tell). find_domain tells of which NVLink domain a device is: those of one domain are joined, also on several hosts,
// whose NVML knows no device of another host. NVML is loaded by the first call in a process and stays; the library
// needs it neither to be built nor to be loaded.
//
// What breaks if this changes: S4 needs packets to arrive whole. They are sent over links that NVLink makes, or that
// are not known and have passed the test of packets.
#pragma once

#include <array>
#include <cstdint>

#include "tokenway/tokenway.h"

namespace tw::cuda {

// By which ranks recognise devices.
using Uuid = std::array<char, 16>;

twLinks_t find_link(const Uuid& own, const Uuid& peer);

// An NVLink domain that may reach beyond a host. Ranks give it to each other as it lies.
struct Domain {
  twDomain_t known = twDomainUnknown;
  uint32_t clique = 0;  // the part of the cluster whose devices reach each other
  Uuid cluster{};

  // Whether NVML has named both, and they are one.
  bool joins(const Domain& other) const {
    return known == twDomainNamed && other.known == twDomainNamed && clique == other.clique && cluster == other.cluster;
  }
};

Domain find_domain(const Uuid& own);

}  // namespace tw::cuda
