// The CPU's backends, as one template over its transport: shared memory (CpuTransport), shared memory and an engine
// between hosts (FabricTransport), and staged transport (StagedTransport). It takes the calls of core/backend.h, runs
// the loops of src/exchange, checks what came against what the handle expects, and shows it through src/views.
//
// It makes the bits of results the same as the kernels' (S9), finishes each step in data or in an error (S6), and
// leaves outputs safe after an error. An expectation that is not checked here (how many rows a peer sends, headers,
// receive offsets) becomes a stray read or write.
#include "core/make_backend.h"

#include <algorithm>

#include "cpu/collecting.h"
#include "cpu/fabric_transport.h"
#include "cpu/fp8_rows.h"
#include "cpu/gathered.h"
#include "cpu/grouped.h"
#include "cpu/loads.h"
#include "cpu/returned.h"
#include "cpu/sharing.h"
#include "cpu/staged.h"
#include "cpu/transport.h"
#include "cpu/vector.h"
#include "exchange/choices.h"
#include "exchange/combine.h"
#include "exchange/dispatch.h"
#include "views/expert_major.h"
#include "views/index_lists.h"

namespace tw::cpu {
namespace {

template <class T>
class CpuBackend : public Backend {
 public:
  CpuBackend(const BackendInit& init, std::shared_ptr<T> transport)
      : Backend(*init.context),
        owned_(std::move(transport)),
        transport_(*owned_),
        partial_(scratch_bytes(shape(), context_.domains)),
        next_(std::max(1, context_.local_experts)),
        counts_(context_.map.shape().ranks),
        choices_(context_.map.shape().ranks),
        loads_(context_) {}

  Status send_dispatch(const DispatchCall& call, HandleArrays& handle) override {
    if constexpr (kStaged) {
      if (transport_.gathers(shape(), call.bound)) return send_gathered(call, handle);
    }
    const Shape& rows = call.rows.map.shape();
    const uint64_t row = rows.dispatch_bytes() + meta_bytes(rows.top_k);
    const Routing routing = handle.sent_routing(rows, context_.me);
    transport_.begin(call.at, {routing.send_counts, 1 + rows.payloads, row, loads_.bytes()}, call.send_only);
    if (loads_.counts()) loads_.put(transport_, call, handle);
    const auto begin = [&](int rank) {
      return rows.exact() ? handle.counts.begin[rank] : int64_t{context_.me} * call.bound;
    };
    tw::send_dispatch(transport_, call.rows.map, call.at, routing, call.payloads, note_of(call, handle),
                      receive_offset_of(call, handle), begin);
    return {};
  }

  Status send_counts(const CountsCall& call, HandleArrays& handle) override {
    transport_.begin(call.at, {nullptr, 1, WindowMap::counts_bytes(shape())}, call.send_only);
    tw::send_counts(transport_, context_.map, call.at, context_.placement, handle.routing, call.receive_offset,
                    note_of(call, handle));
    return {};
  }

  Status send_combine(const CombineCall& call, HandleArrays& handle) override {
    if (shape().per_expert != 0) return send_per_expert(call, handle);
    const Received& received = handle.received;
    const Part part = Part::of(call.sent.map.shape(), call.part);
    count_part(shape(), received, part, counts_.data());
    const RowTypes types{call.rows_dtype, call.sent.wire, call.sent.elements, call.weighted, call.sent.scale};
    const bool values = call.sent.values;
    const Shape& rows = call.sent.map.shape();
    const Folding folding{call.sent.map, {call.sent.wire, call.sent.wire, call.sent.elements, false}, values};
    transport_.begin(
        call.at,
        {counts_.data(), values ? 2 : 1, rows.combine_bytes + (values ? choice_bytes(rows.top_k) : 0), 0,
         folds_between(transport_, context_.domains) ? Area::kFolds : Area::kReturns, &call.sent.map, &folding},
        call.send_only);
    const auto send = [&](auto&& terms) {
      tw::send_combine(transport_, call.sent.map, call.at, received, part, counts_.data(), types, note_of(call), terms,
                       call.sent.scales == twScalesNone ? sum_rows : sum_to_fp8, partial_.data(), call.keep_own,
                       values);
    };
    if (layout_of(call.layout).by_expert) {
      place_received(context_, call.layout, call.alignment, next_.data(), handle);
      ExpertPlaces places(shape(), context_.placement, context_.me, context_.local_experts, next_.data());
      send(ExpertMajorTerms{places, call.rows, call.values.in});
    } else {
      send(RankMajorTerms{shape(), context_.placement, context_.me, call.rows, call.values.in});
    }
    return {};
  }

  Status send_collective(const CollectiveCall& call) override {
    cpu::send_collective(transport_, context_, call, counts_.data());
    return {};
  }

  Status send_refusal(StepPlace at, const Refusal&) override {
    std::fill_n(counts_.begin(), shape().ranks, 0);
    transport_.begin(at, {counts_.data(), 0, 0}, true);
    publish_step(transport_, context_.map, at, Mode::kRefused, 0, [](int) { return 0; });
    return {};
  }

  StepEnd finish_dispatch(const DispatchCall& call, TimePoint deadline, HandleArrays& handle) override {
    Received& received = handle.received;
    StepEnd end = await_step(transport_, context_.map, call.at, Mode::kDispatch, note_of(call, handle), deadline,
                             received.counts);
    const bool exact = call.rows.map.shape().exact();
    for (int peer = 0; peer < shape().ranks && exact && end.code == twSuccess; ++peer) {
      // A peer sends as many rows as it announced, or it dispatches another handle.
      if (received.counts[peer] == handle.counts.at(shape(), peer, context_.me)) continue;
      end = {twCallMismatch, peer, {}, static_cast<uint32_t>(call.bound)};
      std::fill_n(received.counts, shape().ranks, 0);
    }
    const auto begin = [&](int source) { return first_row(call, handle, source); };
    if (!take_meta(transport_, call.rows.map, call.at, call.bound, &received, begin)) {
      if (end.code == twSuccess) end = {twInternalError, context_.me, {}, 0};
      std::fill_n(received.counts, shape().ranks, 0);
    }
    if (end.code == twSuccess) loads_.take(transport_, call, handle);
    show(call, handle);
    return end;
  }

  StepEnd finish_counts(const CountsCall& call, TimePoint deadline, HandleArrays& handle, KnownCounts* known) override {
    const StepEnd end =
        await_step(transport_, context_.map, call.at, Mode::kCounts, note_of(call, handle), deadline, counts_.data());
    if (end.code != twSuccess) return end;
    *known = {};
    known->overflow =
        take_counts(transport_, context_.map, call.at, context_.local_experts, call.room, call.drop, &handle.counts);
    if (!within_leases(context_.map, handle.counts, call.room)) return {twInternalError, context_.me, {}, 0};
    place_experts(context_.local_experts, call.alignment, handle);
    for (int32_t source = 0; source < shape().ranks; ++source) {
      known->received.push_back(handle.counts.at(shape(), source, context_.me));
    }
    known->expert_rows.assign(handle.counts.experts, handle.counts.experts + context_.local_experts);
    known->flat_rows = handle.counts.source[shape().ranks];
    known->grouped_rows = handle.experts.begin[context_.local_experts];
    known->known = true;
    return end;
  }

  bool counts_ready(StepPlace at, TimePoint until) override {
    if constexpr (requires { transport_.ask(false); }) transport_.ask(false);
    const bool ready = would_end(transport_, context_.map, at, until);
    if constexpr (requires { transport_.ask(true); }) transport_.ask(true);
    return ready;
  }

  StepEnd finish_combine(const CombineCall& call, TimePoint deadline, HandleArrays& handle) override {
    const Shape& rows = call.sent.map.shape();
    const Routing routing = handle.sent_routing(rows, context_.me);
    const Part part = Part::of(rows, call.part);
    StepEnd end =
        await_step(transport_, context_.map, call.at, Mode::kCombine, note_of(call), deadline, counts_.data());
    each_returning(routing, part, [&](int32_t, int32_t, const Destination& from) { --counts_[from.rank]; });
    for (int peer = 0; peer < shape().ranks && end.code == twSuccess; ++peer) {
      // Every row that went to a peer comes back, or the peer combines another handle.
      if (counts_[peer] != 0) end = {twCallMismatch, peer, {}, static_cast<uint32_t>(call.bound)};
    }
    if (end.code == twSuccess) {
      sum_returned(transport_, context_, call, routing, part, partial_.data());
    } else {
      spoil(call, routing);
    }
    return end;
  }

  StepEnd finish_collective(const CollectiveCall& call, TimePoint deadline) override {
    return cpu::finish_collective(transport_, context_, call, deadline, counts_.data());
  }

  Status send_sharing(const SharingCall& call, HandleArrays& handle) override {
    cpu::send_sharing(transport_, context_, call, handle, counts_.data());
    return {};
  }
  StepEnd finish_sharing(const SharingCall& call, TimePoint deadline, HandleArrays& handle) override {
    return cpu::finish_sharing(transport_, context_, call, deadline, handle, counts_.data());
  }
  void spoil_sharing(const SharingCall& call, const HandleArrays& handle) override { cpu::spoil_sharing(call, handle); }

  StepEnd skip(const CombineCall& call, TimePoint deadline, HandleArrays& handle) override {
    std::fill_n(counts_.begin(), shape().ranks, 0);
    transport_.begin(call.at, {counts_.data(), 0, 0}, false);
    publish_step(transport_, context_.map, call.at, Mode::kSkip, 0, [](int) { return 0; });
    const StepEnd end = await_step(transport_, context_.map, call.at, Mode::kSkip, 0, deadline, counts_.data());
    if (end.code != twSuccess) spoil(call, handle.routing);
    return end;
  }

  StepEnd drain(StepPlace at, TimePoint deadline) override {
    return await_step(transport_, context_.map, at, Mode::kNone, kMaxCount, deadline, counts_.data(), true);
  }

  std::byte* window() override { return transport_.local(0); }
  std::byte* window_of(int rank) override { return rank == context_.me ? window() : transport_.window_of(rank); }
  std::shared_ptr<void> keep_window() override { return transport_.window(); }

  void read_loads(float* loads, int64_t* dispatches) override { loads_.read(loads, dispatches); }
  Status tell_ready(uint32_t word) override { return loads_.tell_ready(word); }
  MapVersion version(int32_t channel) override { return loads_.version(channel); }

  Status prepare_growth(const BackendInit& init, WindowMap* grown) override {
    next_partial_.resize(scratch_bytes(grown->shape(), context_.domains));
    return transport_.prepare_growth(init, *grown);
  }
  void end_growth(bool grown, bool /*certain*/) override {
    if (grown) partial_.swap(next_partial_);
    next_partial_ = {};
    transport_.end_growth(grown);
  }

  bool describe(twPortableInfo_t* info) const override {
    if constexpr (kStaged) transport_.describe(info);
    return kStaged;
  }

  const std::shared_ptr<T>& transport() const { return owned_; }

  void announce_abort(AbortSignal reason) override { transport_.announce_abort(reason); }
  AbortSignal find_abort() override { return transport_.find_abort(); }
  AbortSignal abort_of(int writer) override { return transport_.abort_of(writer); }

 private:
  static constexpr bool kStaged = std::is_same_v<T, StagedTransport>;

  // Sends a part of a combine per expert.
  Status send_per_expert(const CombineCall& call, HandleArrays& handle) {
    const Received& received = handle.received;
    const Shape& rows = call.sent.map.shape();
    const Part part = Part::of(rows, call.part);
    count_part(shape(), received, part, counts_.data());
    count_choices_of_part(shape(), context_.placement, context_.me, received, part, choices_.data());
    const bool values = call.sent.values;
    transport_.begin(call.at,
                     {choices_.data(), values ? 2 : 1, rows.combine_bytes + (values ? uint64_t{sizeof(float)} : 0), 0,
                      Area::kReturns, &call.sent.map},
                     call.send_only);
    place_received(context_, call.layout, call.alignment, next_.data(), handle);
    ExpertPlaces places(shape(), context_.placement, context_.me, context_.local_experts, next_.data());
    tw::send_choices(transport_, call.sent.map, call.at, received, part, counts_.data(),
                     {call.rows_dtype, call.sent.wire, call.sent.elements, false}, note_of(call),
                     ExpertMajorTerms{places, call.rows, call.values.in}, sum_rows, partial_.data(), values);
    return {};
  }

  // Writes NaN for all tokens of a combine that failed, those of parts before too.
  void spoil(const CombineCall& call, const Routing& routing) const {
    if (call.sent.values) fill_nan(call.values.out, twFloat32, int64_t{routing.tokens} * shape().top_k);
    for (int32_t token = 0; token < routing.tokens; ++token) {
      fill_nan(call.out + token * call.out_stride, call.out_dtype, call.sent.elements);
    }
  }

  // The notes: what ranks must have alike in a step.
  static uint64_t note_of(const DispatchCall& call, const HandleArrays& handle) {
    return collective_note(with_receive_offsets(call.bound, call.has_offsets),
                           mix_rows(mix_counted(handle.map.digest, call.counted), call.rows.digest));
  }
  static uint64_t note_of(const CountsCall& call, const HandleArrays& handle) {
    return collective_note(static_cast<uint32_t>(call.room), mix_rows(handle.map.digest, call.growth));
  }
  static uint64_t note_of(const CombineCall& call) {
    return collective_note(static_cast<uint32_t>(call.bound), call.sent.digest);
  }

  // Sends all tokens to all ranks (cpu/gathered.h).
  Status send_gathered(const DispatchCall& call, HandleArrays& handle) {
    const uint64_t note = note_of(call, handle);
    const Routing routing = handle.sent_routing(call.rows.map.shape(), context_.me);
    const Counts* const counts = call.rows.map.shape().exact() ? &handle.counts : nullptr;
    const Gathered gathered{
        context_, call.rows.map, call.at, call.bound, note, counts, receive_offset_of(call, handle)};
    const uint64_t row = gathered_row_bytes(call.rows.map.shape());
    // After an error, a step of a group that has ended may still land in the window that others share.
    const auto unpack = [this, lives = std::weak_ptr<void>(lives_), gathered](int source, const Frame& frame,
                                                                              const std::byte* message) {
      if (lives.expired()) return;
      unpack_gathered(transport_, gathered, source, static_cast<int32_t>(frame.tokens), message);
      if (frame.bytes != frame.tokens * gathered_row_bytes(gathered.map.shape()) + loads_.bytes()) return;
      if (!loads_.counts()) return;
      std::memcpy(transport_.local(loads_.place(gathered.at, source)), message + frame.bytes - loads_.bytes(),
                  loads_.bytes());
    };
    std::byte* const message =
        transport_.begin_gathered(call.at, routing.tokens, row, loads_.bytes(), call.send_only, unpack);
    pack_gathered(call.rows.map.shape(), routing, call.payloads, message);
    if (loads_.counts()) {
      const void* const told = loads_.tell(call, handle);
      const auto tokens = static_cast<uint64_t>(routing.tokens);
      std::memcpy(message + tokens * row, told, loads_.bytes());
      std::memcpy(transport_.local(loads_.place(call.at, context_.me)), told, loads_.bytes());
    }
    put_picked(transport_, gathered, context_.me, routing, call.payloads);
    publish_step(transport_, context_.map, call.at, Mode::kDispatch, note,
                 [&](int peer) { return routing.send_counts[peer]; });
    return {};
  }

  static const uint64_t* receive_offset_of(const DispatchCall& call, const HandleArrays& handle) {
    return call.has_offsets ? handle.counts.receive_offset : nullptr;
  }

  // The row where a source's rows begin.
  int64_t first_row(const DispatchCall& call, const HandleArrays& handle, int source) const {
    return call.rows.map.shape().exact() ? handle.counts.source[source] : int64_t{source} * call.bound;
  }

  // Fills the caller's tensors from what arrived.
  void show(const DispatchCall& call, HandleArrays& handle) {
    const DispatchTargets& targets = call.targets;
    const Received& received = handle.received;
    const auto window_row = [&](int q, int source, int p) -> const std::byte* {
      const auto row = static_cast<uint64_t>(first_row(call, handle, source) + p);
      return transport_.local(row_place(call.rows.map, call.at, receive_offset_of(call, handle), context_.me, q, row));
    };
    const Layout& layout = layout_of(targets.layout);
    if (layout.by_expert) {
      ExpertMajorOut out;
      out.rows_per_expert = static_cast<int64_t>(shape().ranks) * call.bound;
      place_received(context_, targets.layout, targets.alignment, next_.data(), handle);
      if (layout.packed) out.first = layout.exact ? handle.experts.begin : handle.experts.slot_begin;
      out.rows = targets.rows;
      std::copy(std::begin(targets.payloads), std::end(targets.payloads), out.payloads);
      std::copy(std::begin(targets.columns), std::end(targets.columns), out.columns);
      out.ids = targets.ids;
      out.weights = targets.weights;
      out.origins = targets.origins;
      out.source_counts = targets.source_counts;
      out.counts = targets.counts;
      scatter_expert_major(call.rows.map.shape(), context_.placement, received, context_.me, context_.local_experts,
                           context_.ids, out, window_row, [&](int source) { return first_row(call, handle, source); });
      for (int32_t expert = 0; targets.offsets != nullptr && expert <= context_.local_experts; ++expert) {
        targets.offsets[expert] = static_cast<int32_t>(out.first[expert]);
      }
      return;
    }
    if (layout.exact) {
      unpack_flat(shape(), context_.placement, received, context_.me, handle.counts.source, context_.ids, targets.ids,
                  targets.weights);
    } else {
      unpack_rank_major(shape(), context_.placement, received, context_.me, call.bound, context_.ids, targets.ids,
                        targets.weights);
    }
    std::copy_n(received.counts, shape().ranks, targets.counts);
    if (targets.lists.wanted()) {
      write_index_lists(shape(), context_.placement, received, context_.me, context_.local_experts, targets.lists,
                        next_.data(), [&](int source) { return first_row(call, handle, source); });
    }
    for (int q = 0; q < call.rows.payloads; ++q) {
      if (targets.payloads[q] == nullptr) continue;
      const uint64_t row = call.rows.map.shape().payload_bytes[q];
      for (int source = 0; source < shape().ranks; ++source) {
        const size_t bytes = received.counts[source] * row;
        const size_t at = static_cast<size_t>(first_row(call, handle, source)) * row;
        if (bytes > 0) std::memcpy(targets.payloads[q] + at, window_row(q, source, 0), bytes);
      }
    }
  }

  std::shared_ptr<T> owned_;
  T& transport_;
  std::vector<std::byte> partial_;       // scratch_bytes
  std::vector<std::byte> next_partial_;  // that of a larger group, while it is prepared
  std::vector<int32_t> next_;            // [L]
  std::vector<int32_t> counts_;          // [N]
  std::vector<int32_t> choices_;         // [N] choices of a combine per expert, by owner
  Loads loads_;
  std::shared_ptr<void> lives_ = std::make_shared<int>();
};

}  // namespace
}  // namespace tw::cpu

namespace tw {

Status make_cpu_backend(const BackendInit& init, std::unique_ptr<Backend>* backend) {
  if (init.arena != nullptr) {
    const auto& arena = static_cast<const cpu::CpuBackend<cpu::CpuTransport>&>(*init.arena);
    auto transport = std::make_shared<cpu::CpuTransport>(*arena.transport());  // over the same windows
    *backend = std::make_unique<cpu::CpuBackend<cpu::CpuTransport>>(init, std::move(transport));
    return {};
  }
  cpu::Windows windows;
  TW_RETURN_IF_FAILED(cpu::map_windows(init, &windows));
  auto transport = std::make_shared<cpu::CpuTransport>(init, std::move(windows));
  *backend = std::make_unique<cpu::CpuBackend<cpu::CpuTransport>>(init, std::move(transport));
  return {};
}

Status make_fabric_backend(const BackendInit& init, std::unique_ptr<Backend>* backend) {
  std::shared_ptr<cpu::FabricTransport> transport;
  if (init.arena != nullptr) {  // its words and staging are the lanes'
    transport = static_cast<const cpu::CpuBackend<cpu::FabricTransport>&>(*init.arena).transport();
    TW_RETURN_IF_FAILED(transport->place(init));
  } else {
    TW_RETURN_IF_FAILED(cpu::FabricTransport::make(init, &transport));
  }
  *backend = std::make_unique<cpu::CpuBackend<cpu::FabricTransport>>(init, std::move(transport));
  return {};
}

Status make_staged_backend(const BackendInit& init, std::unique_ptr<Backend>* backend) {
  std::shared_ptr<cpu::StagedTransport> transport;
  if (init.arena != nullptr) {  // its queues of moves are the lanes'
    transport = static_cast<const cpu::CpuBackend<cpu::StagedTransport>&>(*init.arena).transport();
  } else {
    TW_RETURN_IF_FAILED(cpu::StagedTransport::make(init, &transport));
  }
  *backend = std::make_unique<cpu::CpuBackend<cpu::StagedTransport>>(init, std::move(transport));
  return {};
}

}  // namespace tw
