// A group's configuration, checked and with every default filled in.
#pragma once

#include <vector>

#include "bootstrap/bootstrap.h"
#include "core/env.h"
#include "core/placement.h"
#include "core/status.h"
#include "layout/window_map.h"

namespace tw {

struct GroupConfig {
  twGroupConfig_t given{};  // as the caller gave it, defaults filled in; its pointers are not used
  uint32_t first_step = 0;
  bool on_device = false;
  PlacementSpec placement;
  std::vector<int32_t> expert_rank;    // [E], or [P] of physical slots
  std::vector<int32_t> expert_slot;    // likewise
  std::vector<int32_t> local_experts;  // [N]
  WindowMap map;

  const Shape& shape() const { return map.shape(); }
};

// Bytes of one element; 0 for what is no dtype.
int dtype_bytes(twDtype_t dtype);
const char* dtype_name(twDtype_t dtype);
// One that combine can sum.
bool is_summable(twDtype_t dtype);

// Checks a caller's configuration for a group of `ranks`. Errors name the field, its value and the allowed range.
// `on_device`: for the CUDA backend, whose windows have lines and chunk words beside what the CPU's have. `carried`:
// its rows go over a carrier, without lines.
Status check_config(const twGroupConfig_t& given, int32_t ranks, bool on_device, const Environment& environment,
                    GroupConfig* config, bool carried = false);

// The configuration as a parcel, and the first difference between ranks' parcels, as a sentence that names the field
// and the ranks.
std::string pack_config(const GroupConfig& config);
Status compare_configs(const std::vector<Parcel>& parcels);

twWindowBytes_t window_bytes(const GroupConfig& config);

}  // namespace tw
