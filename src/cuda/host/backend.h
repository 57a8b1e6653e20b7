// The CUDA backend's class. Its calls are in host/backend.cc (dispatches, combines, views, errors), steps.cc,
// counts.cc, collectives.cc, ids.cc and settle.cc, its making in creation.cc.
//
// Takes the calls that the core has checked (core/backend.h) and turns each into launches on the caller's stream;
// errors come later, through Control. Calls only enqueue, unless TOKENWAY_BLOCKING asks to wait.
//
// What breaks if this changes: S5 (banks and channels come from the core's host order, the kernels are told them), S6
// (an error that finishes the group ends all kernels: on_stop, announce_abort), S8 (every grid comes from budget_). The
// order of destruction matters: memory goes after the last kernel that may look at it.
#pragma once

#include <initializer_list>
#include <memory>
#include <mutex>
#include <vector>

#include "core/interrupt.h"
#include "core/make_backend.h"
#include "cuda/host/arena.h"
#include "cuda/host/group_memory.h"
#include "cuda/launch/choices.h"
#include "cuda/launch/collective.h"
#include "cuda/launch/combine.h"
#include "cuda/launch/dispatch.h"
#include "cuda/launch/values.h"
#include "cuda/launch/view.h"
#include "cuda/plan/budget.h"
#include "cuda/transport/staged.h"
#include "cuda/transport/window.h"

namespace tw::cuda {

// Gives the largest power of two up to 16 that divides everything.
int width_of(std::initializer_list<uint64_t> values);
inline uint64_t address_of(const void* at) { return reinterpret_cast<uintptr_t>(at); }

class NvlinkBackend : public Backend {
 public:
  explicit NvlinkBackend(const BackendInit& init)
      : Backend(*init.context),
        device_(init.device),
        in_process_(init.bootstrap->in_process()),
        blocking_(init.blocking),
        sm_limit_(init.sm_limit) {}

  ~NvlinkBackend() override {
    const OnDevice on(device_);
    settle();
    if (memory_ != nullptr) arena_->forget(view_);
    memory_.reset();
    arena_.reset();  // after the last kernel that may look at its pages
    const DeviceMapping::UnmapsHere here;
    windows_.by_rank.clear();
  }

  Status open(const BackendInit& init);

  bool on_device() const override { return true; }
  DeviceLinks links() const override {
    return {view_.packet_tokens, windows_.links, windows_.handles, windows_.refusal};
  }
  bool describe(twPortableInfo_t* info) const override;

  WindowMap places(const WindowMap& rows, int32_t bound, int64_t shown) const override;

  bool captures(const void* stream) const override;
  bool captures_any() const override;
  Status prepare_growth(const BackendInit& init, WindowMap* grown) override;
  void end_growth(bool grown, bool certain) override;
  Status check_stream(const void* stream) const override {
    if (!in_process_ || (stream != nullptr && stream != cudaStreamLegacy)) return {};
    return fail(twInvalidArgument,
                "{} is {}, the default stream; local ranks may wait for each other on a device, so each needs a "
                "non-blocking stream of its own",
                Argument("stream"), stream);
  }

  // A call that receives too is the whole step, launched here; otherwise finish_* launches the rest.
  Status send_dispatch(const DispatchCall& call, HandleArrays& handle) override {
    return make_dispatch(call, handle, true);
  }
  Status send_combine(const CombineCall& call, HandleArrays& handle) override {
    return make_combine(call, handle, true);
  }
  Status send_counts(const CountsCall& call, HandleArrays& handle) override { return make_counts(call, handle, true); }
  Status send_collective(const CollectiveCall& call) override { return make_collective(call, true); }
  Status send_sharing(const SharingCall& call, HandleArrays& handle) override { return make_sharing(call, handle); }
  bool can_refuse(const Refusal& refusal) const override;
  Status send_refusal(StepPlace at, const Refusal& refusal) override;
  Status keep_pace(StepPlace at, int32_t bound, const CombineRows& sent, void* stream) override;
  Status keep_sharing_pace(const SharingCall& call) override;

  StepEnd finish_dispatch(const DispatchCall& call, TimePoint, HandleArrays& handle) override {
    return end_of(call.stream, call.send_only ? make_dispatch(call, handle, false) : Status{});
  }
  StepEnd finish_combine(const CombineCall& call, TimePoint, HandleArrays& handle) override {
    return end_of(call.stream, call.send_only ? make_combine(call, handle, false) : Status{});
  }
  StepEnd finish_collective(const CollectiveCall& call, TimePoint) override {
    return end_of(call.stream, call.send_only ? make_collective(call, false) : Status{});
  }
  StepEnd finish_sharing(const SharingCall& call, TimePoint, HandleArrays&) override {
    return end_of(call.stream, Status{});
  }
  StepEnd finish_counts(const CountsCall& call, TimePoint deadline, HandleArrays& handle, KnownCounts* known) override;
  void read_counts(const HandleArrays& handle, TimePoint until, KnownCounts* known) override;
  Status find_layout(const LayoutCall& call) override;
  void forget(HandleArrays& handle) override {
    if (handle.device.counts_page != nullptr) {
      memory_->give_page(static_cast<CountsOnHost*>(handle.device.counts_page), handle.device.page_serial);
    }
    handle.device.counts_page = nullptr;
  }

  Status abandon(StepPlace at, const Refusal& sent) override;
  // Nothing is left to wait for: a refusal's kernel has waited for the peers.
  StepEnd drain(StepPlace, TimePoint) override { return {}; }

  std::shared_ptr<void> keep_window() override;

  void announce_abort(AbortSignal reason) override { control_->announce_abort(reason); }
  AbortSignal find_abort() override { return control_->find_abort(); }
  AbortSignal abort_of(int writer) override { return control_->abort_of(writer); }
  Status network_failure() override { return control_->network_failure(); }

  void read_loads(float* loads, int64_t* dispatches) override { memory_->read_loads(context_, loads, dispatches); }
  Status replace_map(int32_t layer, const ExpertMap& map, void* stream) override;
  Status stage_map(int32_t layer, uint32_t epoch, const ExpertMap& map) override {
    const OnDevice on(device_);
    return memory_->moving().stage(layer, epoch, shape(), map);
  }
  Status close_map(int32_t layer, bool used) override {
    const OnDevice on(device_);
    return memory_->moving().close(layer, used);
  }
  Status tell_ready(uint32_t word) override {
    const OnDevice on(device_);
    return memory_->moving().tell(word);
  }
  MapVersion version(int32_t channel) override { return memory_->version(channel); }
  bool poll(ErrorRecord* record) override;

  // Waits for this rank's calls. Ranks of one process wait for their own streams only: a device that ranks share may
  // hold a kernel of another rank that waits for a later call of this one.
  void settle() override;
  cudaError_t wait_for_calls();  // gives the first error that waiting met
  // Do what cudaStreamSynchronize and cudaDeviceSynchronize do, for as long as peers please; when the caller wants the
  // wait to end, the group is given up, which ends its kernels.
  cudaError_t settle_stream(cudaStream_t stream);
  cudaError_t settle_device();

  std::byte* allocate(size_t bytes) override {
    const OnDevice on(device_);
    return memory_->allocate(bytes);
  }
  void release(std::byte* block) override {
    const OnDevice on(device_);
    memory_->release(block);
  }

  Status copy_counts(const HandleArrays& handle, int32_t* counts) override {
    const OnDevice on(device_);
    const OutsideCaptures outside;
    const auto stream = static_cast<cudaStream_t>(handle.device.stream);
    TW_CUDA(cudaMemcpyAsync(counts, handle.received.counts, sizeof(int32_t) * shape().ranks, cudaMemcpyDeviceToHost,
                            stream));
    TW_CUDA(settle_stream(stream));
    return was_interrupted() ? fail(twInterrupted, "interrupted in a wait for the device") : Status{};
  }

 private:
  std::byte* window() override { return windows_.by_rank[context_.me]->data(); }
  std::byte* window_of(int rank) override;
  Status copy(std::byte* to, const std::byte* from, uint64_t bytes, void* stream) override;
  // Fills in where the rows of each payload arrive at this rank.
  void fill_receive_offsets(const DispatchCall& call, std::byte** receive_offset);

  Status make_arena(const BackendInit& init, uint64_t* tag);
  Status share_arena(const BackendInit& init, uint64_t* tag);
  Status test_links(const BackendInit& init, bool may, uint64_t* tag);
  Status may_use_packets(bool* may);
  Status test_packets();
  Status fill_view(const BackendInit& init);
  // Takes over what follows from the map of context_.
  void fit_view();
  Status budget_for(const Shape& shape, Budget* budget) const;
  // The budget of a call of such rows that has a limit of its own, or 0.
  Budget budget_of(const Shape& rows, int32_t sm_limit) const { return for_rows(limited(budget_, sm_limit), rows); }
  Status least(const BackendInit& init, uint64_t tag, std::initializer_list<int32_t*> values);
  Status run_dispatch(const DispatchCall& call, HandleArrays& handle, bool send, bool receive);
  Status part_of(const CombineCall& call, const HandleArrays& handle, bool send, CombineParams* params);
  Status run_combine(const CombineCall& call, HandleArrays& handle, bool send, bool receive);
  Status run_choices(const CombineCall& call, const Budget& budget, const CombineParams& params, bool early);
  Status run_sums(const CombineCall& call, const ChoicesParams& choices);
  // Whether a kernel of its own sums what this rank has sent to itself too (cuda/launch/bias.h).
  bool sums_alone(const CombineCall& call) const { return call.bias.data != nullptr || context_.domains.fold(); }
  Status run_collective(const CollectiveCall& call, bool send, bool receive);
  Status run_sharing(const SharingCall& call, HandleArrays& handle, bool send, bool receive);
  // Makes the digest of a routing that nothing has read before.
  Status run_digest(HandleArrays& handle, bool capturing, void* stream);
  Status run_refusal(StepPlace at, const Refusal& refusal, bool send, bool receive);
  // Makes a step (host/steps.cc): one kernel, or, over a staged transport, one before the moves and one behind them.
  // Without `sends` the step was sent alone before, and is finished now.
  template <class Call, class MakeBlocks, class Run>
  Status make(const Call& call, twPhase_t phase, bool sends, MakeBlocks&& blocks, Run&& run);
  Status make_dispatch(const DispatchCall& call, HandleArrays& handle, bool sends);
  Status make_combine(const CombineCall& call, HandleArrays& handle, bool sends);
  Status make_counts(const CountsCall& call, HandleArrays& handle, bool sends);
  Status make_collective(const CollectiveCall& call, bool sends);
  Status make_sharing(const SharingCall& call, HandleArrays& handle);
  // The rest down to bank_of() serves the staged transport; only view_at() is used without it too.
  GroupView view_at(StepPlace at, const WindowMap& map, bool waits) const;
  bool in_trouble() const;
  void give_up() {
    const auto me = static_cast<uint32_t>(context_.me);
    control_->announce_abort({twPeerAborted, me, me, true});
  }
  Blocks dispatched(const WindowMap& map, int channel, int32_t bound) const;
  static Blocks combined(const WindowMap& map, int32_t bound, bool values);
  Blocks counted() const;
  Blocks collected(const CollectiveMap& places, bool gathers) const;
  Blocks shared(const CollectiveMap& places) const;
  template <class Run>
  Status send_staged(const MovedStep& step, const Blocks& blocks, bool send_only, Run&& run);
  template <class Run>
  Status arrive(const MovedStep& step, const Blocks& blocks, bool at_once, Run&& run);
  Status land_rows(const DispatchCall& call, HandleArrays& handle);
  bool over_carrier() const { return staged_ != nullptr && staged_->over_carrier(); }
  int bank_of(StepPlace at) const { return over_carrier() ? at.bank() : -1; }
  bool fill_copy(const DispatchCall& call, const HandleArrays& handle, ViewParams* params);
  Status run_by_expert(const DispatchCall& call, const Budget& budget, const HandleArrays& handle,
                       const DispatchParams& dispatch, bool* placed);
  Status run_views(const DispatchCall& call, const Budget& budget, HandleArrays& handle, bool placed);
  Status run_index_lists(const DispatchCall& call, const Budget& budget, const HandleArrays& handle);
  Status run_source_counts(const DispatchCall& call, const Budget& budget, const HandleArrays& handle);
  Status run_places(const CombineCall& call, const Budget& budget, HandleArrays& handle);
  // Launch what a combine with values of choices has beside its own kernel (host/values.cc); nothing without values.
  ValuesParams values_of(const CombineCall& call, const HandleArrays& handle) const;
  Status put_values(const CombineCall& call, HandleArrays& handle);
  Status take_values(const CombineCall& call, const HandleArrays& handle);
  ArrivedParams arrived_params(const HandleArrays& handle, const WindowMap& map, int32_t channel, int32_t bound) const;
  using LaunchView = int(const ViewParams& params, int grid, bool early, void* stream);
  Status run_view(const char* what, LaunchView* launch, const Budget& budget, const ViewParams& params, void* stream);
  // Gives the blocks of a kernel that copies rows and waits for nobody.
  int view_blocks(const Budget& budget) const {
    return static_cast<int>(std::clamp<int64_t>(shape().most_rows(), 1, budget.view_grid));
  }
  Status run_counts(const CountsCall& call, HandleArrays& handle, bool send, bool receive);
  IdsIn ids_of(const HandleArrays& handle, bool copied) const;
  Status choose_for_layout(const LayoutCall& call, const IdsIn& in);
  // Whether physical experts are chosen by the quotas of a batch.
  bool balances() const { return !context_.maps->empty() && context_.spec->policy == twReplicaBalanced; }
  // budget: the call's.
  Status choose_slots(const Budget& budget, const HandleArrays& handle, StepPlace at, twPhase_t phase, void* stream,
                      IdsIn* in);
  bool poll_others(ErrorRecord* record);
  StepEnd end_of(void* stream, const Status& run);
  // `rows`: the shape of the call's rows, which is of one mode where the group has both.
  HandleView view_of(const HandleArrays& handle, const Shape& rows) const;
  Shown shown_of(const DispatchTargets& targets, const HandleArrays& handle) const;
  void remember(void* stream);
  const int device_;
  const bool in_process_;
  const bool blocking_;
  const int sm_limit_;
  Budget budget_;
  // What end_growth takes over.
  struct Larger {
    WindowMap map;
    Budget budget;
    uint32_t* marks = nullptr;
  };
  Larger larger_;
  DeviceWindows windows_;
  std::shared_ptr<DeviceArena> arena_;
  Control* control_ = nullptr;         // the arena's, likewise
  StagedTransport* staged_ = nullptr;  // NULL: devices write into each other's windows
  std::unique_ptr<GroupMemory> memory_;
  GroupView view_{};
  DispatchScratch dispatch_{};
  CombineScratch combine_{};
  CollectiveScratch collective_{};
  TimePoint trouble_since_{};  // when trouble of others was first seen
  uint64_t counts_told_ = 0;   // exchanges of counts of which the host learns
  void* last_stream_ = nullptr;
  std::vector<void*> streams_;  // streams that were used, to be waited for at the end
};

}  // namespace tw::cuda
