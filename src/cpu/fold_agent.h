// The agent that folds for owners on other hosts (docs/PROTOCOL.md, "A combine by domain"): where a group's domains are
// its hosts, the ranks of a host put their partials for an owner into the memory of the rank of theirs that is the
// owner's rail peer. There a thread, to which each combine's send gives a job, waits for the host's signals of that
// step (T1: no completing call folds), folds over ranks ascending, and puts the folds to the owner, with its rows word.
//
// Jobs are done in the order of sends. One that waits for a mate that never comes keeps those behind it waiting; all of
// them wait for that mate too, as all ranks send in one order (S5).
//
// What breaks if this changes: the order of terms and the one rounding are bits (exchange/domains.h). A job without
// rows must add to the rows word too, or the owner waits.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "cpu/host_message.h"
#include "cpu/outline.h"
#include "exchange/signals.h"
#include "layout/hosts_map.h"

namespace tw::cpu {

// What there is of a token's partials for one owner: by rank of the host ascending.
struct Partials {
  FoldTag* tags = nullptr;          // [local]
  const std::byte* rows = nullptr;  // [local] rows of Folded::stride
};

// Where a folding combine's rows lie, and how they are told apart.
struct Folded {
  StepPlace at{};
  Folding folding;
  int rail = 0;  // of the owner

  // Bytes from one rank's partial of a token to the next's, and where its values of choices begin in them.
  uint64_t values_at() const { return Record::padded(folding.map.shape().combine_bytes); }
  uint64_t stride() const {
    return values_at() + (folding.values ? Record::padded(choice_bytes(folding.map.shape().top_k)) : 0);
  }
};

// Writes the folds of all tokens of a part into a message for their owner, and clears the tags. partials(token): what
// there is of one. scratch: room for a row.
void fold_into(HostMessage& message, const Folded& folded, int tokens, int local,
               const std::function<Partials(int token)>& partials, std::byte* scratch);

class FoldAgent {
 public:
  FoldAgent();
  ~FoldAgent();
  FoldAgent(const FoldAgent&) = delete;
  FoldAgent& operator=(const FoldAgent&) = delete;

  // A job looks now and then whether `stopped` says that it is to end.
  using Job = std::function<void(const std::function<bool()>& stopped)>;
  void give(Job job);

 private:
  void run();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Job> jobs_;
  bool ends_ = false;
  std::thread thread_;
};

}  // namespace tw::cpu
