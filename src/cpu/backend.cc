// The CPU's backend: the shared exchange and views over CpuTransport.
#include "core/backend.h"

#include <algorithm>
#include <functional>
#include <numeric>

#include "cpu/transport.h"
#include "cpu/vector.h"
#include "exchange/combine.h"
#include "exchange/dispatch.h"
#include "views/expert_major.h"

namespace tw::cpu {
namespace {

class CpuBackend : public Backend {
 public:
  CpuBackend(const BackendInit& init, Windows windows)
      : context_(*init.context),
        transport_(init, std::move(windows)),
        partial_(context_.map.shape().combine_bytes),
        next_(std::max(1, context_.local_experts)),
        counts_(context_.map.shape().ranks),
        dispatch_row_(std::accumulate(shape().payload_bytes, shape().payload_bytes + shape().payloads, uint64_t{0})) {}

  Status send_dispatch(const DispatchCall& call, HandleArrays& handle) override {
    transport_.expect(step_bytes(handle.routing.destination_count(), dispatch_row_));
    tw::send_dispatch(transport_, context_.map, call.at, handle.routing, call.payloads, call.bound);
    return {};
  }

  Status send_combine(const CombineCall& call, HandleArrays& handle) override {
    const Received& received = handle.received;
    const RowTypes types{call.rows_dtype, context_.wire, context_.elements, call.weighted};
    const int64_t rows = std::accumulate(received.counts, received.counts + shape().ranks, int64_t{0});
    transport_.expect(step_bytes(rows, shape().combine_bytes));
    const auto send = [&](auto&& terms) {
      tw::send_combine(transport_, context_.map, call.at, received, types, static_cast<uint32_t>(call.bound), terms,
                       sum_rows, partial_.data(), call.keep_own);
    };
    if (call.layout == twRankMajor) {
      send(RankMajorTerms{shape(), context_.placement, context_.me, call.rows});
    } else {
      ExpertPlaces places(shape(), context_.placement, context_.me, context_.local_experts, next_.data());
      send(ExpertMajorTerms{places, call.rows});
    }
    return {};
  }

  Status send_refusal(StepPlace at, const HandleArrays*, void*) override {
    publish_step(transport_, context_.map, at, Mode::kRefused, 0, [](int) { return 0; });
    return {};
  }

  StepEnd finish_dispatch(const DispatchCall& call, TimePoint deadline, HandleArrays& handle) override {
    Received& received = handle.received;
    StepEnd end = await_step(transport_, context_.map, call.at, Mode::kDispatch, static_cast<uint32_t>(call.bound),
                             deadline, received.counts);
    if (!take_meta(transport_, context_.map, call.at, call.bound, &received)) {
      if (end.code == twSuccess) end = {twInternalError, context_.me, {}, 0};
      std::fill_n(received.counts, shape().ranks, 0);
    }
    show(call, received);
    return end;
  }

  StepEnd finish_combine(const CombineCall& call, TimePoint deadline, HandleArrays& handle) override {
    const Routing& routing = handle.routing;
    StepEnd end = await_step(transport_, context_.map, call.at, Mode::kCombine, static_cast<uint32_t>(call.bound),
                             deadline, counts_.data());
    for (int peer = 0; peer < shape().ranks && end.code == twSuccess; ++peer) {
      // Every row that went there comes back, or the peer combines another handle.
      if (counts_[peer] == routing.send_counts[peer]) continue;
      end = {twCallMismatch, peer, {}, static_cast<uint32_t>(call.bound)};
    }
    if (end.code == twSuccess) {
      const RowTypes types{context_.wire, call.out_dtype, context_.elements, false};
      const auto own_row = [&](int32_t slot) { return call.keep_own ? call.rows.at(context_.me, slot) : nullptr; };
      receive_combine(transport_, context_.map, call.at, routing, types, own_row, call.out, call.out_stride, sum_rows);
    } else {
      for (int32_t token = 0; token < routing.tokens; ++token) {
        fill_nan(call.out + token * call.out_stride, call.out_dtype, context_.elements);
      }
    }
    return end;
  }

  StepEnd drain(StepPlace at, TimePoint deadline) override {
    return await_step(transport_, context_.map, at, Mode::kNone, kMaxCount, deadline, counts_.data(), true);
  }

  void* view(StepPlace at, int q) override {
    return transport_.local(context_.map.payload(at.lane, at.bank(), q, 0, 0, 0));
  }

  bool in_window(const void* address) override {
    const auto* const at = static_cast<const std::byte*>(address);
    const std::byte* const window = transport_.local(0);
    return std::less_equal<>()(window, at) && std::less<>()(at, window + context_.map.bytes());
  }

  void announce_abort(AbortWord reason) override { transport_.announce_abort(reason); }
  AbortWord find_abort() override { return transport_.find_abort(); }
  AbortWord abort_of(int writer) override { return transport_.abort_of(writer); }

 protected:
  int32_t ranks() const override { return shape().ranks; }

 private:
  const Shape& shape() const { return context_.map.shape(); }

  // What all ranks put in a step, were they all like this one.
  uint64_t step_bytes(int64_t rows, uint64_t row_bytes) const {
    return static_cast<uint64_t>(rows) * row_bytes * static_cast<uint64_t>(shape().ranks);
  }

  const std::byte* window_row(const DispatchCall& call, int q, int source, int p) const {
    return transport_.local(context_.map.payload(call.at.lane, call.at.bank(), q, source, p, call.bound));
  }

  // Fills the caller's tensors from what arrived.
  void show(const DispatchCall& call, const Received& received) {
    const DispatchTargets& targets = call.targets;
    if (targets.layout == twExpertMajor) {
      ExpertMajorOut out;
      std::copy(std::begin(targets.payloads), std::end(targets.payloads), out.payloads);
      out.ids = targets.ids;
      out.weights = targets.weights;
      out.counts = targets.counts;
      scatter_expert_major(shape(), context_.placement, received, context_.me, context_.local_experts, call.bound,
                           context_.ids, out, [&](int q, int source, int p) { return window_row(call, q, source, p); });
      return;
    }
    unpack_rank_major(shape(), context_.placement, received, context_.me, call.bound, context_.ids, targets.ids,
                      targets.weights);
    if (targets.counts != received.counts) std::copy_n(received.counts, shape().ranks, targets.counts);
    for (int q = 0; q < shape().payloads; ++q) {
      if (targets.payloads[q] == nullptr) continue;
      for (int source = 0; source < shape().ranks; ++source) {
        const size_t bytes = received.counts[source] * shape().payload_bytes[q];
        const size_t at = static_cast<size_t>(source) * call.bound * shape().payload_bytes[q];
        if (bytes > 0) std::memcpy(targets.payloads[q] + at, window_row(call, q, source, 0), bytes);
      }
    }
  }

  const Context& context_;
  CpuTransport transport_;
  std::vector<std::byte> partial_;  // one combined row
  std::vector<int32_t> next_;       // [L]
  std::vector<int32_t> counts_;     // [N]
  uint64_t dispatch_row_;           // bytes of a token's payloads
};

}  // namespace
}  // namespace tw::cpu

namespace tw {

Status make_cpu_backend(const BackendInit& init, std::unique_ptr<Backend>* backend) {
  cpu::Windows windows;
  TW_RETURN_IF_FAILED(cpu::map_windows(init, &windows));
  *backend = std::make_unique<cpu::CpuBackend>(init, std::move(windows));
  return {};
}

}  // namespace tw
