// The CUDA backend's class: calls are in backend.cc, coming into being in creation.cc.
#pragma once

#include <initializer_list>
#include <memory>
#include <mutex>
#include <vector>

#include "core/backend.h"
#include "core/interrupt.h"
#include "nvlink/carriage.h"
#include "nvlink/control.h"
#include "nvlink/memory.h"
#include "nvlink/window.h"

namespace tw::nvlink {

inline Status launched(const char* what, int error) { return error == 0 ? Status{} : cuda_failure(what, error); }

// The largest power of two up to 16 that divides everything.
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
    if (control_ != nullptr) control_->end_watch();  // its thread uses the arena
    settle();
    carriage_.reset();
    arena_.reset();
    control_.reset();  // after the last kernel that may look at its pages
    const DeviceMapping::UnmapsHere here;
    windows_.by_rank.clear();
  }

  Status open(const BackendInit& init);

  bool on_device() const override { return true; }
  bool describe(twPortableInfo_t* info) const override;

  bool captures(const void* stream) const override;
  Status check_stream(const void* stream) const override {
    if (!in_process_ || (stream != nullptr && stream != cudaStreamLegacy)) return {};
    return fail(twInvalidArgument,
                "stream is %p, the default stream; local ranks may wait for each other on a device, so each needs a "
                "non-blocking stream of its own",
                stream);
  }

  // A call that receives too is all of the step, launched here; else finish_* launches the rest.
  Status send_dispatch(const DispatchCall& call, HandleArrays& handle) override {
    return make_dispatch(call, handle, true);
  }
  Status send_combine(const CombineCall& call, HandleArrays& handle) override {
    return make_combine(call, handle, true);
  }
  Status send_counts(const CountsCall& call, HandleArrays& handle) override { return make_counts(call, handle, true); }
  Status send_collective(const CollectiveCall& call) override { return make_collective(call, true); }
  bool can_refuse(const Refusal& refusal) const override;
  Status send_refusal(StepPlace at, const Refusal& refusal) override;
  Status keep_pace(StepPlace at, int32_t bound, void* stream) override;

  StepEnd finish_dispatch(const DispatchCall& call, TimePoint, HandleArrays& handle) override {
    return end_of(call.stream, call.send_only ? make_dispatch(call, handle, false) : Status{});
  }
  StepEnd finish_combine(const CombineCall& call, TimePoint, HandleArrays& handle) override {
    return end_of(call.stream, call.send_only ? make_combine(call, handle, false) : Status{});
  }
  StepEnd finish_collective(const CollectiveCall& call, TimePoint) override {
    return end_of(call.stream, call.send_only ? make_collective(call, false) : Status{});
  }
  StepEnd finish_counts(const CountsCall& call, TimePoint deadline, HandleArrays& handle, KnownCounts* known) override;
  void read_counts(const HandleArrays& handle, TimePoint until, KnownCounts* known) override;
  void forget(HandleArrays& handle) override {
    if (handle.counts_page != nullptr) {
      arena_->give_page(static_cast<CountsOnHost*>(handle.counts_page), handle.page_serial);
    }
    handle.counts_page = nullptr;
  }

  // A refusal's kernel has waited for the peers.
  StepEnd drain(StepPlace, TimePoint) override { return {}; }

  std::shared_ptr<void> keep_window() override;

  void announce_abort(AbortWord reason) override { control_->announce_abort(reason); }
  AbortWord find_abort() override { return control_->find_abort(); }
  AbortWord abort_of(int writer) override { return control_->abort_of(writer); }

  void read_loads(float* loads, int64_t* dispatches) override { arena_->read_loads(context_, loads, dispatches); }
  Status replace_map(int32_t layer, const ExpertMap& map, void* stream) override;
  bool poll(twErrorRecord_t* record) override;

  // Ranks of one process wait for their own streams only: a device that ranks share may hold a kernel of another rank
  // that waits for a later call of this one.
  void settle() override;
  cudaError_t wait_for_calls();  // the first error of it
  // As cudaStreamSynchronize and cudaDeviceSynchronize, for as long as peers please; when the caller wants the wait to
  // end, the group is given up, which ends its kernels.
  cudaError_t settle_stream(cudaStream_t stream);
  cudaError_t settle_device();

  std::byte* allocate(size_t bytes) override {
    const OnDevice on(device_);
    return arena_->allocate(bytes);
  }
  void release(std::byte* block) override {
    const OnDevice on(device_);
    arena_->release(block);
  }

  Status copy_counts(const HandleArrays& handle, int32_t* counts) override {
    const OnDevice on(device_);
    const OutsideCaptures outside;
    const auto stream = static_cast<cudaStream_t>(handle.stream);
    TW_CUDA(cudaMemcpyAsync(counts, handle.received.counts, sizeof(int32_t) * shape().ranks, cudaMemcpyDeviceToHost,
                            stream));
    TW_CUDA(settle_stream(stream));
    return was_interrupted() ? fail(twInterrupted, "interrupted in a wait for the device") : Status{};
  }

 private:
  std::byte* window() override { return windows_.by_rank[context_.me]->data(); }
  // Where the rows of each payload land here.
  void fill_landing(const DispatchCall& call, std::byte** landing);

  Status connect(const BackendInit& init, uint64_t* tag);
  Status may_use_lines(bool* may);
  Status test_lines();
  Status fill_view(const BackendInit& init);
  Status least(const BackendInit& init, uint64_t tag, std::initializer_list<int32_t*> values);
  Status run_dispatch(const DispatchCall& call, HandleArrays& handle, bool send, bool receive);
  Status run_combine(const CombineCall& call, HandleArrays& handle, bool send, bool receive);
  Status run_collective(const CollectiveCall& call, bool send, bool receive);
  Status run_refusal(StepPlace at, const Refusal& refusal, bool send, bool receive);
  // A step (carrying.cc): one kernel, or, over a carrier, one before the moves and one behind them. `sends`: else it
  // was sent alone, and is finished.
  template <class Call, class Regions, class Run>
  Status make(const Call& call, bool sends, bool land, Regions&& regions, Run&& run);
  Status make_dispatch(const DispatchCall& call, HandleArrays& handle, bool sends);
  Status make_combine(const CombineCall& call, HandleArrays& handle, bool sends);
  Status make_counts(const CountsCall& call, HandleArrays& handle, bool sends);
  Status make_collective(const CollectiveCall& call, bool sends);
  // Over a carrier.
  GroupView view_at(StepPlace at, bool waits) const;
  bool in_trouble() const;
  void give_up() {
    const auto me = static_cast<uint32_t>(context_.me);
    control_->announce_abort({twPeerAborted, me, me, true});
  }
  std::vector<Region> dispatched(int32_t bound) const;
  std::vector<Region> combined(int32_t bound) const;
  std::vector<Region> counted() const;
  std::vector<Region> collected(const CollectiveMap& places) const;
  template <class Run>
  Status carry(StepPlace at, const std::vector<Region>& regions, bool land, bool send_only, void* stream, Run&& run);
  template <class Run>
  Status arrive(StepPlace at, bool at_once, void* stream, Run&& run);
  Status land_rows(const DispatchCall& call, HandleArrays& handle);
  int bank_of(StepPlace at) const { return carriage_ != nullptr ? at.bank() : -1; }
  void share_out(const CollectiveCall& call, CollectiveParams* p) const;
  Status run_views(const DispatchCall& call, HandleArrays& handle);
  Status run_places(const CombineCall& call, HandleArrays& handle);
  ViewParams view_params(const HandleArrays& handle, int32_t lane, int32_t bound) const;
  using LaunchView = int(const ViewParams& params, int grid, bool early, void* stream);
  Status run_view(const char* what, LaunchView* launch, const ViewParams& params, void* stream);
  // Blocks of a kernel that copies rows and waits for nobody.
  int view_blocks() const { return static_cast<int>(std::clamp<int64_t>(shape().most_rows(), 1, view_grid_)); }
  Status run_counts(const CountsCall& call, HandleArrays& handle, bool send, bool receive);
  IdsIn ids_of(const HandleArrays& handle, bool copied) const;
  Status choose_slots(const HandleArrays& handle, StepPlace at, twPhase_t phase, void* stream, IdsIn* in);
  bool poll_others(twErrorRecord_t* record);
  StepEnd end_of(void* stream, const Status& run);
  HandleView view_of(const HandleArrays& handle) const;
  Shown shown_of(const DispatchTargets& targets, const HandleArrays& handle) const;
  void remember(void* stream);
  // Blocks for so many rows, to be sent and received or only one of the two; at most so many of them send. With little
  // to do, a warp has an SM to itself.
  Roles roles_of(int64_t rows, const Units& units, bool both, int most) const;
  // Blocks that send rows which are no lines: so many percent of the device's SMs fill the link, and where a kernel has
  // few SMs, at most so many of those send.
  int bulk_senders(int filling, int at_most) const {
    return std::max({1, max_grid_ * filling / 100, std::min(device_sms_ * filling, max_grid_ * at_most) / 100});
  }
  // Whether so few blocks send that they do not fill the link by much.
  bool is_few(const Roles& roles, int filling) const { return roles.sending < device_sms_ * filling / 100; }
  // Of a call; `lines`: all its rows are. Few SMs have kernels whose warps hide what a unit costs beside its bytes: 8,
  // 16 and 24 of 132 gain by them.
  Kind kind_of(bool usual, bool lines) const {
    if (lines) return Kind::kLines;
    if (!usual) return Kind::kAny;
    return few_sms() ? Kind::kFew : Kind::kUsual;
  }
  bool few_sms() const { return 4 * max_grid_ <= device_sms_; }
  void share_dispatch(uint64_t words, bool known, DispatchParams* params) const;
  void share_combine(int64_t returning, bool full, CombineParams* params) const;
  // The same where all rows are lines: while that gives every unit a warp, on half of the SMs, so that the next kernel
  // finds the other half. With more, so many percent of the device's SMs fill the link, and what the others take does
  // not wait behind stores: where half of them sent, 512 tokens took 57 us there and back instead of 52.
  //
  // With up to `busy` units for each block of an eighth of the SMs, those send (and as many receive): what the next
  // kernel's blocks do when they come takes this one time. A reduce of 1 row took 3.8 us so, with 30 blocks to a side
  // 4.2; but a dispatch of 8 rows 4.28, with 33 blocks 4.13.
  Roles line_roles(int64_t rows, const Units& units, bool both, int filling, int busy) const;
  // Of calls of the usual kind (params.h): all rows are lines.
  bool all_lines(int32_t bound) const {
    return !shape().exact() && shape().ranks > 1 && shape().ranks <= kRanksAtOnce && bound > 0 &&
           bound <= std::min(view_.line_tokens, kMostLines);
  }
  // The token from which on rows travel as lines: so many rows as pass the link in the time of the fence and the word
  // behind those before them. `all`: such rows of a call. `few`: of SMs, which take longer for lines.
  int32_t first_line(int32_t tokens, int all, bool few) const {
    return tokens <= view_.line_tokens ? 0 : tokens - std::min<int32_t>(view_.line_tokens, tail_of(all, few));
  }
  // Such rows for each peer, of so many in all.
  int tail_of(int all, bool few) const {
    return few ? kTailLines : std::max(kTailLines, all / std::max(1, shape().ranks - 1));
  }

  const int device_;
  const bool in_process_;
  const bool blocking_;
  const int sm_limit_;
  int sharing_ = 1;
  int device_sms_ = 1;
  int max_grid_ = 1;   // blocks of a kernel that waits: those of all lanes and ranks of a device fit on it (S8)
  int view_grid_ = 1;  // of one that does not
  int32_t summed_tail_ = kTailLines;  // rows of a combine that are lines behind others, for each owner; of all ranks
  DeviceWindows windows_;
  std::unique_ptr<Arena> arena_;
  std::unique_ptr<Control> control_;
  std::unique_ptr<Carriage> carriage_;  // NULL: devices write into each other's windows
  GroupView view_{};
  DispatchScratch dispatch_{};
  CombineScratch combine_{};
  CollectiveScratch collective_{};
  // Kernels may be on the device before those before them have ended. Of one lane alone: with several, or several ranks
  // on the device, one that is not yet needed could take the room of one that is (S8).
  bool early_ = false;
  bool early_views_ = false;
  Tally tally_ = Tally::kNone;
  std::mutex reports_;         // they are taken by calls, and by whoever asks for the group's error
  TimePoint trouble_since_{};  // when others' trouble was first seen
  uint64_t counts_told_ = 0;   // exchanges of counts that the host learns of
  void* last_stream_ = nullptr;
  std::vector<void*> streams_;  // that were used, to be waited for at the end
};

}  // namespace tw::nvlink
