// Folding for owners on other hosts (cpu/fold_agent.h).
#include "cpu/fold_agent.h"

#include <utility>

#include "core/interrupt.h"
#include "cpu/vector.h"

namespace tw::cpu {

void fold_into(HostMessage& message, const Folded& folded, int tokens, int local,
               const std::function<Partials(int token)>& partials, std::byte* scratch) {
  const WindowMap& map = folded.folding.map;
  const Shape& shape = map.shape();
  const StepPlace at = folded.at;
  std::vector<const void*> rows;
  for (int token = 0; token < tokens; ++token) {
    const Partials found = partials(token);
    rows.clear();
    uint32_t position = 0;
    for (int rail = 0; rail < local; ++rail) {
      const FoldTag tag = std::exchange(found.tags[rail], {});
      if (tag.place == 0 || tag.step != at.step) continue;  // this rank has none, and an earlier step's lies there
      const std::byte* const row = found.rows + static_cast<uint64_t>(rail) * folded.stride();
      if (rows.empty()) position = tag.place - 1;
      rows.push_back(row);
      if (!folded.folding.values) continue;
      message.put(folded.rail, map.inbox_values(at.channel, at.bank(), token, static_cast<int>(tag.place - 1)),
                  row + folded.values_at(), choice_bytes(shape.top_k));
    }
    if (rows.empty()) continue;
    const void* fold = rows.front();  // of one term: that term
    if (rows.size() > 1) {
      sum_rows(scratch, rows.data(), nullptr, static_cast<int>(rows.size()), folded.folding.travels);
      fold = scratch;
    }
    // At the place of the domain's first rank: the owner looks for the others nowhere.
    message.put(folded.rail, map.inbox(at.channel, at.bank(), token, static_cast<int>(position)), fold,
                shape.combine_bytes);
  }
}

FoldAgent::FoldAgent() {
  thread_ = start_thread([this] { run(); });
}

FoldAgent::~FoldAgent() {
  {
    const std::lock_guard lock(mutex_);
    ends_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void FoldAgent::give(Job job) {
  {
    const std::lock_guard lock(mutex_);
    jobs_.push_back(std::move(job));
  }
  changed_.notify_all();
}

void FoldAgent::run() {
  const std::function<bool()> stopped = [this] {
    const std::lock_guard lock(mutex_);
    return ends_;
  };
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return ends_ || !jobs_.empty(); });
    if (ends_) return;
    const Job job = std::move(jobs_.front());
    jobs_.pop_front();
    lock.unlock();
    job(stopped);
    lock.lock();
  }
}

}  // namespace tw::cpu
