// What the kernels of a group may use of a device, decided once at creation, and how many blocks a call's work takes.
//
// Takes the description of a device and asks no device; gives a Budget, Roles and Kind. make_budget fails with
// twInvalidArgument where the channels do not fit.
//
// What breaks if this changes: S8. Kernels that wait for peers must all find room on their device at once, or they wait
// for each other's SMs. Which blocks send and which receive is speed alone, as long as each row has one (S7 is the
// kernels').
#pragma once

#include <cstdint>

#include "core/status.h"
#include "cuda/launch/group_view.h"
#include "cuda/launch/tiles.h"
#include "cuda/plan/tuning.h"

namespace tw::cuda {

struct Device {
  int sms = 1;
  int major = 9;  // major compute capability
};

struct Budget {
  const Tuning* tuning = nullptr;
  int device_sms = 1;
  int room = 1;       // blocks of a kernel that waits for which the device has room beside those of all other channels
                      // and ranks (S8)
  int max_grid = 1;   // blocks of a kernel that waits: at most `room`, less the blocks for load statistics
  int view_grid = 1;  // blocks of a kernel that waits for nobody
  // Packet bound: most tokens of a rank that go all as packets; 0: none do. In a group of both modes each call has less
  // if its rows do (Shape::packet_tokens).
  int32_t packet_tokens = 0;
  int32_t summed_tail = 0;  // rows of a combine that go as packets behind Simple rows, for each owner
  LoadsBlock loads_block = LoadsBlock::kNone;
  // Whether kernels may come onto the device before those before them have ended (launch/launch.h): only with one
  // channel, and one rank alone on the device. Otherwise a kernel that is not yet needed could take the room of one
  // that is (S8).
  bool early = false;
  bool early_views = false;

  // Whether the kernels use at most a quarter of the device. Then there are low-SM kernels, whose warps hide what a
  // tile costs beside its bytes. 8, 16 and 24 of 132 SMs gain by them.
  bool low_sm() const { return 4 * max_grid <= device_sms; }
};

// Makes the budget of a group. `sharing`: ranks of the group on this device; `sm_limit`: 0 for none; `staged`: rows go
// over a staged transport. Fails with twInvalidArgument if the channels do not fit.
Status make_budget(const Device& device, const Shape& shape, int sm_limit, int sharing, bool staged, Budget* budget);
// Gives the budget of a call that has a limit of its own, in place of the group's; 0: it has none. What ranks have
// agreed on stays, as limits may differ: packet_tokens and summed_tail.
Budget limited(const Budget& group, int sm_limit);

// Gives the budget of calls with such rows: in a group of both modes each has its own packet bound.
Budget for_rows(const Budget& budget, const Shape& rows);

// ---- Blocks

// Gives the blocks for `rows` rows that are sent and received (`both`) or only one of the two; at most `most` blocks
// send. With little to do, a warp has an SM to itself.
Roles roles_of(const Budget& budget, int64_t rows, const Tiles& tiles, bool both, int most);

// Gives the blocks where all rows are packets. As long as half of the SMs give every tile a warp, it takes no more than
// that half, so that the next kernel finds the other half free. With more tiles, `sends` percent of the device's SMs
// send: they fill the link, and what the other blocks take does not wait behind stores. If there are at most `busy`
// tiles for each block of an eighth of the SMs, that eighth sends (and as many blocks receive), because the next
// kernel's blocks take time from this one when they come.
Roles packet_roles(const Budget& budget, int64_t rows, const Tiles& tiles, bool both, int sends, int busy);

// Gives the blocks that send Simple rows: `sends` percent of the device's SMs, which fill the link, but where a kernel
// has few SMs at most `at_most` percent of those.
int simple_senders(const Budget& budget, int sends, int at_most);

// Whether so few blocks send that they fall well short of filling the link.
inline bool underfills(const Budget& budget, const Roles& roles, int sends) {
  return roles.sending < budget.device_sms * sends / 100;
}

// ---- Packets

// Whether a call of the usual kind sends all rows as packets.
bool all_packets(const Budget& budget, const Shape& shape, int32_t bound);

// Gives the rows for each peer that go as packets behind Simple rows; `all` are those of all peers together. A few SMs
// (`few`) take longer for packets, so they send fewer.
int tail_of(const Tuning& tuning, const Shape& shape, int all, bool few);

Kind kind_of(const Budget& budget, bool usual, bool packets);

}  // namespace tw::cuda
