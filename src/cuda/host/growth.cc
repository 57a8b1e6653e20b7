// How the CUDA backend grows: windows, numbers and tables for a larger map, made beside those that there are, and taken
// over at once. Kernels that were launched or captured before have their own parameters and lose nothing, so nothing
// here waits for the device.
//
// What breaks if this changes: memory is zero before a peer can write there (packets and chunk signals of a step are
// told from old ones by their numbers); the packet bound and the combine's tail become the least of all ranks' (S4);
// what a rank may have told its peers of stays mapped (end_growth, `certain`).
#include <algorithm>

#include "cuda/host/backend.h"
#include "cuda/launch/loading.h"
#include "cuda/transport/posted.h"
#include "exchange/notes.h"

namespace tw::cuda {

bool NvlinkBackend::captures_any() const {
  return std::any_of(streams_.begin(), streams_.end(), [&](const void* stream) { return captures(stream); });
}

Status NvlinkBackend::budget_for(const Shape& shape, Budget* budget) const {
  cudaDeviceProp prop{};
  TW_CUDA(cudaGetDeviceProperties(&prop, device_));
  const Device device{prop.multiProcessorCount, prop.major};
  return make_budget(device, shape, sm_limit_, windows_.sharing, staged_ != nullptr, budget);
}

void NvlinkBackend::fit_view() {
  dispatch_ = DispatchScratch::make(shape());
  combine_ = CombineScratch::make(shape());
  collective_ = CollectiveScratch::make(shape());
  view_.map = context_.map;
  view_.packet_tokens = budget_.packet_tokens;
  view_.note_bits = note_bits(shape().max_tokens);
}

Status NvlinkBackend::prepare_growth(const BackendInit& init, WindowMap* grown) {
  const OnDevice on(device_);
  const OutsideCaptures outside;
  larger_ = {};
  Status prepared =
      staged_ != nullptr ? staged_->prepare_growth(init, grown) : grow_device_windows(init, init.tag, *grown, windows_);
  larger_.map = *grown;
  if (prepared.ok()) prepared = budget_for(grown->shape(), &larger_.budget);
  if (prepared.ok()) prepared = memory_->make_marks(grown->shape(), &larger_.marks);
  if (prepared.ok()) prepared = launched("loading the kernels", load_kernels(grown->shape()));
  TW_RETURN_IF_FAILED(agree(*init.bootstrap, init.members, init.tag + PostedTransport::kTags, init.deadline,
                            "mapping windows", prepared));
  if (view_.packet_tokens == 0)
    larger_.budget.packet_tokens = 0;  // the links have not passed the test, or are not used
  return least(init, init.tag + PostedTransport::kTags + 1,
               {&larger_.budget.packet_tokens, &larger_.budget.summed_tail});
}

void NvlinkBackend::end_growth(bool grown, bool certain) {
  const OnDevice on(device_);
  const OutsideCaptures outside;
  if (grown) {
    budget_ = larger_.budget;
    view_.marks = larger_.marks;
    fit_view();
  } else if (staged_ == nullptr && certain) {
    drop_growth(windows_, context_.me, in_process_, larger_.map);
  }
  if (staged_ != nullptr) staged_->end_growth(grown, certain);
  larger_ = {};
}

}  // namespace tw::cuda
