// The exchange of counts on a device, as the host sees it: launched, and told through memory that both map.
//
// Takes a CountsCall; gives the launch, and in read_counts() what the device has told, waiting until a deadline, an
// error or an interrupt.
//
// What breaks if this changes: the serial tells exchanges of a handle apart, so the host would take one's counts for
// another's; the exchange is a step (S1 to S9), whose kernel keeps the invariants.
#include <algorithm>
#include <thread>

#include "cuda/host/backend.h"
#include "cuda/launch/counts.h"

namespace tw::cuda {

Status NvlinkBackend::run_counts(const CountsCall& call, HandleArrays& handle, bool send, bool receive) {
  const OnDevice on(device_);
  remember(call.stream);
  const bool capturing = captures(call.stream);
  CountsParams p{};
  p.group = view_at(call.at, context_.map, !call.send_only);
  p.handle = view_of(handle, shape());
  p.in = ids_of(handle, !send);
  const Budget budget = limited(budget_, call.sm_limit);
  if (send) TW_RETURN_IF_FAILED(choose_slots(budget, handle, call.at, twPhaseCounts, call.stream, &p.in));
  if (send && !p.in.own && shape().counts_loads != 0) {
    TW_CUDA(cudaMemsetAsync(handle.map.choices, 0, sizeof(int32_t) * static_cast<size_t>(shape().choices()),
                            static_cast<cudaStream_t>(call.stream)));
  }
  p.told = memory_->told(call.at.channel, shape());
  p.channel = call.at.channel;
  p.bank = bank_of(call.at);
  p.tokens = handle.routing.tokens;
  p.room = call.room;
  p.alignment = call.alignment;
  p.drop = call.drop ? 1 : 0;
  p.growth = call.growth;
  handle.device.brought = false;
  std::copy(std::begin(call.receive_offset), std::end(call.receive_offset), p.receive_offset);
  p.send = send;
  p.receive = receive;
  // A replay would tell of an exchange that the host has not called; and what the host knows it need not be told again.
  if (call.known) {
  } else if (receive && !capturing) {
    if (handle.device.counts_page == nullptr) handle.device.counts_page = memory_->take_page();
    if (handle.device.counts_page == nullptr)
      return fail(twOutOfMemory, "no host memory for counts that a device tells");
    p.on_host = static_cast<CountsOnHost*>(handle.device.counts_page);
    p.expert_rows = p.on_host->expert_rows();
    p.serial = handle.device.counts_serial = handle.device.page_serial = ++counts_told_;
  } else if (receive) {
    handle.device.counts_serial = 0;
  }
  const int most = budget.max_grid;
  const int blocks = send ? std::clamp((p.tokens + kCounted - 1) / kCounted, 1, most) : 1;
  TW_RETURN_IF_FAILED(launched("an exchange of counts", launch_counts(p, blocks, call.stream)));
  if (send) TW_RETURN_IF_FAILED(run_digest(handle, capturing, call.stream));
  // As with a dispatch: each replay reads the caller's tensors.
  if (send && !capturing) handle.source = {};
  handle.device.stream = call.stream;
  return {};
}

StepEnd NvlinkBackend::finish_counts(const CountsCall& call, TimePoint deadline, HandleArrays& handle,
                                     KnownCounts* known) {
  const StepEnd end = end_of(call.stream, call.send_only ? make_counts(call, handle, false) : Status{});
  if (end.code == twSuccess && blocking_ && !call.known && !captures(call.stream)) read_counts(handle, deadline, known);
  return end;
}

void NvlinkBackend::read_counts(const HandleArrays& handle, TimePoint until, KnownCounts* known) {
  const auto* const page = static_cast<const CountsOnHost*>(handle.device.counts_page);
  const auto* const serial = &page->serial;
  for (int looks = 0; __atomic_load_n(serial, __ATOMIC_ACQUIRE) != handle.device.counts_serial; ++looks) {
    if (std::chrono::steady_clock::now() >= until || control_->find_abort().kind != 0 || control_->dead() >= 0) {
      return;
    }
    if (is_interrupted()) return;
    if (looks > 1000) std::this_thread::sleep_for(std::chrono::microseconds(20));  // it comes in some 10 us, or late
  }
  known->failed = page->failed != 0;
  if (known->failed) return;
  known->received.assign(page->received, page->received + shape().ranks);
  known->expert_rows.assign(page->expert_rows(), page->expert_rows() + context_.local_experts);
  known->flat_rows = 0;
  for (const int32_t rows : known->received) known->flat_rows += rows;
  known->grouped_rows = page->grouped_rows;
  known->overflow = {page->overflow_rank, page->overflow_rows};
  known->known = true;
}

}  // namespace tw::cuda
