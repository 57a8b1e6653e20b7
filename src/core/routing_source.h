// Where the routing of a handle is until a device has read it, and which of its tokens this rank sends.
#pragma once

#include <cstdint>

#include "tokenway/tokenway.h"

namespace tw {

// Where a device finds a routing that its handle has not copied yet. Strides count elements.
struct RoutingSource {
  bool unread = false;  // false: the handle has its own copy
  const void* ids = nullptr;
  twDtype_t id_dtype = twInt32;
  int64_t id_stride[2] = {};       // over tokens, and over k
  const float* weights = nullptr;  // NULL: all 1
  int64_t weight_stride[2] = {};
};

// The tokens of a handle as the caller has them; Routing is that of this rank's share, with token replicas not all.
struct TokensOfSet {
  int32_t tokens = 0;        // T
  int32_t begin = 0;         // of this rank's share
  uint32_t sum = 0;          // on a host: of choice_digest
  RoutingSource source;      // on a device: where all ids and weights are, until they are read
  uint32_t* sums = nullptr;  // on a device: [kDigestBlocks] parts of a sum of choice_digest; NULL without replicas
};

}  // namespace tw
