// Staged transport: how a step's rows move where a group's devices do not reach each other's memory. Kernels write a
// block for each rank into memory of their own device, laid out as a bank of a window is, and what comes behind them on
// their stream moves the blocks into the windows: a carrier's collectives (carrier.h), or kernels that post them
// (posted.h).
//
// Takes a step's place and the parts of its bank that hold something; gives a window in which they lie when what join()
// has put on the stream is done, or, where they are posted, when the step's signals are there. Blocks of one step have
// one size, which follows from the call's bound and the group's rows, so the host need not know how many rows there
// are.
//
// What breaks if this changes: S1 (over a carrier the host names the bank) and S4 (signals are moved behind rows).
#pragma once

#include <memory>
#include <vector>

#include "core/make_backend.h"
#include "cuda/driver/driver.h"
#include "cuda/launch/folds.h"
#include "cuda/transport/window.h"

namespace tw::cuda {

// A part of a bank that a step moves: its offset in the bank, the bytes of one rank's block, and those of each of the
// rows that the block's signal tells of; 0: the block is whole whatever that says. `same`: a token's row is the same in
// the blocks of all ranks.
struct Region {
  uint64_t begin;
  uint64_t bytes;
  uint64_t row = 0;
  bool same = false;
};

// What the moves of a step bring: regions of its bank or, if they `land`, of where rows arrive that are put together
// afterwards; and load statistics, a block for each rank to where `loads` begins in the window.
struct Blocks {
  std::vector<Region> regions;
  bool land = false;
  Region loads{};
  int first = 0;  // ranks from here on, so many, get regions; 0: all. Who knows that moves less
  int ranks = 0;
  SentTokens sent{};  // of a dispatch: whose rows those of the regions that are the `same` are
  bool all = false;   // all ranks get all rows of these regions, in the same slots
  // Of a combine by domain whose first region is folded before it travels; `sent` is that of its dispatch.
  bool folds = false;
  ReturnedRows returned{};
};

// What a step is, to those that move it.
struct MovedStep {
  StepPlace at;
  twPhase_t phase;
  void* stream;
  bool has_bank;  // a view is in the bank of `at`. Over a carrier nobody asks: the host names every step's bank
  bool waits;     // the kernel that receives waits for signals before it looks at rows
  int blocks;     // that kernels may have (S8, sm_limit)
};

class StagedTransport {
 public:
  virtual ~StagedTransport() = default;

  // Tells the kernels of a step where to write: sets view->out and view->out_signals, and who moves that.
  // `map`: that of the step's rows.
  virtual void place(StepPlace at, const WindowMap& map, GroupView* view) const = 0;
  // Makes memory for receive_offset(), for a group in high throughput; if there is some, nothing. Collective.
  virtual Status make_arrivals(const BackendInit& init) = 0;
  // Where rows of a dispatch arrive that are put together afterwards, in high throughput alone.
  virtual const std::byte* receive_offset(StepPlace at) const = 0;

  // Comes before the kernels of a step that sends. `view`: the group's.
  virtual Status begin(const GroupView& view, const MovedStep& step) = 0;
  // Begins to move the signals and the blocks of a step, into its bank or, if they `land`, to receive_offset().
  virtual Status start(const GroupView& view, const MovedStep& step, const Blocks& blocks, bool at_once) = 0;
  // Makes whatever comes next on the stream follow that move. blocks: as in start(); none where nobody wants what
  // comes.
  virtual Status join(const GroupView& view, const MovedStep& step, const Blocks& blocks) = 0;
  // Whether partials of these blocks are folded before they travel, where a group sums by these domains.
  virtual bool folds(const Domains&, const Blocks&) const { return false; }
  // Whether hosts must make the same moves as their peers, also where their kernels have nothing to send; then a rank's
  // host watches how far its steps are, too.
  virtual bool over_carrier() const = 0;
  // Makes memory for what goes out by a larger map, and room for what comes in by it. What graphs and moves of before
  // use stays until the group ends. end_growth: see Backend. Collective; uses tags from init.tag on.
  virtual Status prepare_growth(const BackendInit& init, WindowMap* grown) = 0;
  virtual void end_growth(bool grown, bool certain) = 0;
  // What the carrier has given for these ranks; -1: there is none.
  virtual int64_t carrier_channel() const { return -1; }
  // Why nothing more goes to some peer, where moves do not end for that alone; twSuccess: as far as is known, all goes.
  // From any thread.
  virtual Status failure() { return {}; }
  // Ends the moves that are under way, soon; may be called from any thread.
  virtual void abort() = 0;
};

}  // namespace tw::cuda
