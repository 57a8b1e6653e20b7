// Every number of a launch that was measured rather than derived, in one table by GPU model and number of ranks. A
// group on another device takes the row of the nearest; CONTRIBUTING.md says how to add one.
//
// What breaks if a number changes: speed alone. Results have the same bits with any of them (tests play few and many
// SMs, narrow and wide tiles), as long as ranks agree: `packet_tokens` and the tails are agreed on at creation.
#pragma once

#include <cstdint>

namespace tw::cuda {

// Percentages are of the device's SMs unless they are named otherwise.
struct Tuning {
  const char* gpu;     // the model that the row was measured on, and how its devices are linked
  int sms;             // of that model
  int ranks;           // the row serves groups of up to so many
  const char* source;  // the records in bench/results/ that decided

  // Dispatch. SMs that send Simple rows: as many as fill the link with this kernel's stores.
  int dispatch_sends;           // rows of one payload
  int dispatch_sends_exact;     // of an exact layout, whose senders route nothing
  int dispatch_sends_payloads;  // of several payloads, whose smaller stores take an SM longer
  int dispatch_sends_known;     // of rows alone: their metadata has come before
  int dispatch_sends_most;      // percent of the kernel's own blocks, where it has few
  int packet_dispatch_sends;    // where all rows are packets
  // Packets behind Simple rows cover the fence and the signal of those: tokens, all peers' together.
  int dispatch_tail;
  int dispatch_tail_known;   // metadata has come before
  int dispatch_tail_narrow;  // and tiles at the end are narrow
  int narrow_rows;           // rows before these packets whose tiles are narrow too

  // Combine.
  int combine_sends;
  int combine_sends_most;
  int packet_combine_sends;         // rows as they are
  int packet_combine_sends_summed;  // rows by expert, summed on the way
  int combine_tail;                 // rows for an owner that go as packets behind Simple ones, all owners' together
  int least_tail;                   // of either tail, for each peer
  int turn_rows_low_sm;             // rows that all blocks send in a turn, of a kernel of few SMs
  int turn_rows;                    // of more SMs
  int turn_rows_share;              // and at most one of so many of the call's rows

  // Gathers and reduce-scatters.
  int collective_sends;
  int collective_sends_most;
  int packet_collective_sends;
  int own_by_senders;  // tokens up to which a gather's senders also place this rank's own rows

  // Tiles.
  int low_sm_tiles;  // tiles that every warp of a low-SM kernel has at least
  int summed_tiles;  // the same of sums by expert, or weighted: a tile's terms must be found first
  int busy;          // tiles of packets for each block of an eighth of the SMs up to which no more blocks are taken
};

// The row for a group of `ranks` on devices of `sms` SMs each.
const Tuning& tuning_of(int sms, int ranks);

}  // namespace tw::cuda
