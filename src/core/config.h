// A group's configuration, checked and with every default filled in: check_config takes what a caller gives and a
// number of ranks, and gives a GroupConfig with the window map; pack_config and compare_configs find differences
// between ranks. Whatever decides where bytes lie must be compared here (S10).
#pragma once

#include <vector>

#include "bootstrap/bootstrap.h"
#include "core/dtypes.h"
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
  std::vector<int32_t> expert_rank;    // [E], or [P] of physical experts
  std::vector<int32_t> expert_slot;    // likewise
  std::vector<int32_t> local_experts;  // [N]
  WindowMap map;
  Room room;           // of a lane in a window of this group; in another's window, what this group needs of it
  uint64_t arena = 0;  // number of the arena in whose window the group is placed; 0: in its own
  uint64_t loads = 0;  // where its load statistics are, in those of that window

  const Shape& shape() const { return map.shape(); }
};

// Checks a caller's configuration for a group of `ranks`. Errors name the field, its value and the allowed range.
// `on_device`: for the CUDA backend, whose windows have LL128 packets and chunk signals beside what the CPU's have.
// `staged`: for the staged transport, which has no packets. `least`: what a lane shall have room for, beside what
// given.room_for needs.
Status check_config(const twGroupConfig_t& given, int32_t ranks, bool on_device, const Environment& environment,
                    GroupConfig* config, bool staged = false, const Room& least = {});

// Checks how an expert's rows are aligned in a grouped layout.
Status check_row_alignment(const Argument& name, int32_t alignment);

// pack_config makes the configuration a parcel; compare_configs gives the first difference between ranks' parcels, as a
// sentence that names the field and the ranks.
std::string pack_config(const GroupConfig& config);
Status compare_configs(const std::vector<Parcel>& parcels);

twWindowBytes_t window_bytes(const GroupConfig& config);

}  // namespace tw
