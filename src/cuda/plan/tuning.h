// Every number of a launch that was measured rather than derived, in one table by GPU model and number of ranks.
//
// Takes the SMs of a device and the ranks of a group; gives a row of the table. A group on another device takes the row
// of the nearest; CONTRIBUTING.md says how to add one.
//
// What breaks if a number changes: speed alone. Results have the same bits with any of them (tests play few and many
// SMs, narrow and wide tiles), as long as ranks agree: the packet bound (`packet_tokens`) and the tails are agreed on
// at creation.
#pragma once

#include <cstdint>

namespace tw::cuda {

// One row of the table. Percentages are of the device's SMs unless a comment names something else.
struct Tuning {
  const char* gpu;     // the model on which the row was measured, and how its devices are linked
  int sms;             // SMs of that model
  int ranks;           // the row serves groups of up to so many ranks
  const char* source;  // the records in bench/results/ that decided

  // Dispatch. The SMs that send Simple rows: as many as fill the link with this kernel's stores.
  int dispatch_sends;           // rows of one payload
  int dispatch_sends_exact;     // exact layouts, whose senders route nothing
  int dispatch_sends_payloads;  // several payloads, whose smaller stores take an SM longer
  int dispatch_sends_known;     // rows alone, whose metadata has come before
  int dispatch_sends_most;      // percent of the kernel's own blocks, where it has few
  int packet_dispatch_sends;    // calls whose rows are all packets
  // Packets behind Simple rows cover the fence and the signal of those. Tokens, all peers' together.
  int dispatch_tail;
  int dispatch_tail_known;   // where metadata has come before
  int dispatch_tail_narrow;  // where tiles at the end are narrow too
  int narrow_rows;           // rows before these packets whose tiles are narrow too

  // Combine.
  int combine_sends;
  int combine_sends_most;
  int packet_combine_sends;         // rows that are sent as they are
  int packet_combine_sends_summed;  // rows by expert, summed on the way
  int fp8_combine_sends;            // percent of the kernel's own blocks, which quantise and then join in sums
  int choices_sends;                // percent of the kernel's own blocks, which send rows per expert and then join
  int combine_tail;                 // rows for an owner that go as packets behind Simple rows, all owners' together
  int least_tail;                   // the least of either tail, for each peer
  int turn_rows_low_sm;             // rows that all blocks of a low-SM kernel send in a turn
  int turn_rows;                    // the same for kernels of more SMs
  int turn_rows_share;              // a turn takes at most the call's rows divided by this

  // Gathers and reduce-scatters.
  int collective_sends;
  int collective_sends_most;
  int packet_collective_sends;
  int own_by_senders;  // tokens up to which a gather's senders also place this rank's own rows

  // Tiles.
  int low_sm_tiles;  // tiles that every warp of a low-SM kernel has at least
  int summed_tiles;  // the same for sums by expert or weighted sums, where a tile's terms must be found first
  int busy;  // with at most so many tiles of packets for each block of an eighth of the SMs, no more blocks are taken
};

// Gives the row for a group of `ranks` ranks on devices of `sms` SMs each.
const Tuning& tuning_of(int sms, int ranks);

}  // namespace tw::cuda
