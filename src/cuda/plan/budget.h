// What the kernels of a group may use of a device, decided once at creation. Pure: a device is what it is said to be.
//
// S8: kernels that wait for peers must all find room on their device at once, or they wait for each other's SMs.
#pragma once

#include <cstdint>

#include "core/status.h"
#include "cuda/launch/group_view.h"
#include "cuda/launch/tiles.h"
#include "cuda/plan/tuning.h"

namespace tw::cuda {

struct Device {
  int sms = 1;
  int major = 9;  // of its compute capability
};

struct Budget {
  const Tuning* tuning = nullptr;
  int device_sms = 1;
  int max_grid = 1;   // blocks of a kernel that waits: those of all channels and ranks of the device fit on it (S8)
  int view_grid = 1;  // of a kernel that waits for nobody
  int32_t packet_tokens = 0;  // bound up to which all rows may go as LL128 packets; 0: packets are not in use
  int32_t summed_tail = 0;    // rows of a combine that are packets behind Simple ones, for each owner
  LoadsBlock loads_block = LoadsBlock::kNone;
  // Whether kernels may come onto the device before those before them have ended (launch/launch.h): with one channel
  // and one rank on the device alone, as else one that is not yet needed could take the room of one that is (S8).
  bool early = false;
  bool early_views = false;

  // Up to a quarter of the device: kernels of their own, whose warps hide what a tile costs beside its bytes. 8, 16 and
  // 24 of 132 SMs gain by them.
  bool low_sm() const { return 4 * max_grid <= device_sms; }
};

// `sharing`: ranks of the group on this device; `sm_limit`: 0 for none; `staged`: rows go over a carrier.
// twInvalidArgument if the channels do not fit.
Status make_budget(const Device& device, const Shape& shape, int sm_limit, int sharing, bool staged, Budget* budget);

// ---- Blocks

// Blocks for so many rows, to be sent and received or only one of the two; at most so many of them send. With little to
// do, a warp has an SM to itself.
Roles roles_of(const Budget& budget, int64_t rows, const Tiles& tiles, bool both, int most);

// The same where all rows are packets: while that gives every tile a warp, on half of the SMs, so that the next kernel
// finds the other half. With more, `sends` percent of the device's SMs fill the link, and what the others take does not
// wait behind stores. With up to `busy` tiles for each block of an eighth of the SMs, those send (and as many receive):
// what the next kernel's blocks do when they come takes this one time.
Roles packet_roles(const Budget& budget, int64_t rows, const Tiles& tiles, bool both, int sends, int busy);

// Blocks that send Simple rows: `sends` percent of the device's SMs fill the link, and where a kernel has few SMs, at
// most so many percent of those send.
int simple_senders(const Budget& budget, int sends, int at_most);

// Whether so few blocks send that they do not fill the link by much.
inline bool underfills(const Budget& budget, const Roles& roles, int sends) {
  return roles.sending < budget.device_sms * sends / 100;
}

// ---- Packets

// Whether a call of the usual kind sends all rows as packets.
bool all_packets(const Budget& budget, const Shape& shape, int32_t bound);

// Rows for each peer that go as packets behind Simple ones, of `all` peers' together. A few SMs take longer for
// packets.
int tail_of(const Tuning& tuning, const Shape& shape, int all, bool few);

Kind kind_of(const Budget& budget, bool usual, bool packets);

}  // namespace tw::cuda
