// Outgoing memory and a carrier's collectives: carrier.h tells what they are for.
//
// create() is collective. start() and join() only enqueue on the caller's stream; abort() may come
// from any thread.
//
// What breaks if this changes: blocks and signals of a step must lie in the window at the places of its bank (S1), and
// the signals' move must be one with the rows' (S4: the stream orders them). After an abort nothing may be freed that a
// collective can still write (the destructor keeps the window and leaks the outgoing memory).
#include "cuda/transport/carrier.h"

#include "core/carrier_channel.h"

namespace tw::cuda {

CarrierTransport::CarrierTransport(const BackendInit& init)
    : map_(init.context->map), calls_(init.carrier->calls), device_(init.device) {
  // Of all groups that this window may have: one of them at a time has a step on a channel.
  const uint64_t loads = map_.room().loads;
  bank_at_ = outgoing_loads(map_.shape().ranks) + (loads + kPageAlignment - 1) / kPageAlignment * kPageAlignment;
  channel_bytes_ = channel_bytes_of(map_);
}

CarrierTransport::~CarrierTransport() {
  if (carrier_channel_ >= 0 && !ended()) calls_.close(calls_.context, carrier_channel_, aborted_ ? 0 : 1);
  if (!aborted_) {
    for (std::byte* const memory : former_) cudaFree(memory);
    cudaFree(memory_);
    cudaFree(arrivals_);
  } else {
    new std::shared_ptr<DeviceMapping>(std::move(window_));  // a collective that was called off may still be writing
  }
}

namespace {

// Makes memory for all channels of a map, of so many bytes each.
Status allocate(const WindowMap& map, uint64_t channel_bytes, std::byte** made) {
  const uint64_t bytes = channel_bytes * static_cast<uint64_t>(map.shape().channels);
  void* memory = nullptr;
  if (cudaMalloc(&memory, bytes) != cudaSuccess) {
    (void)cudaGetLastError();
    return fail(twOutOfMemory, "what goes out over the carrier needs {} of device memory; lower max_tokens or lanes",
                bytes_text(bytes));
  }
  *made = static_cast<std::byte*>(memory);
  return clear(*made, bytes);  // nothing of what was there before leaves
}

}  // namespace

Status CarrierTransport::create(const BackendInit& init, uint64_t tag, const Status& ready,
                                std::shared_ptr<DeviceMapping> window, std::unique_ptr<StagedTransport>* made) {
  std::unique_ptr<CarrierTransport> staged(new CarrierTransport(init));
  staged->window_ = std::move(window);
  Status prepared = ready.ok() ? allocate(staged->map_, staged->channel_bytes_, &staged->memory_) : ready;
  if (prepared.ok() && staged->map_.shape().exact()) prepared = staged->make_arrivals(init);
  TW_RETURN_IF_FAILED(open_carrier_channel(init, tag, init.device, prepared, &staged->carrier_channel_));
  *made = std::move(staged);
  return {};
}

Status CarrierTransport::prepare_growth(const BackendInit& init, WindowMap* grown) {
  TW_RETURN_IF_FAILED(grow_own_window(init, *grown, &next_region_));
  *grown = grown->with_channels_at(static_cast<uint64_t>(next_region_->data() - window_->data()));
  next_map_ = *grown;
  TW_RETURN_IF_FAILED(allocate(*grown, channel_bytes_of(*grown), &next_memory_));
  return arrivals_ == nullptr ? Status{} : allocate(*grown, grown->bank_bytes(), &next_arrivals_);
}

Status CarrierTransport::make_arrivals(const BackendInit&) {
  return arrivals_ != nullptr ? Status{} : allocate(map_, map_.bank_bytes(), &arrivals_);
}

void CarrierTransport::end_growth(bool grown, bool) {
  if (grown) {
    window_->attach(std::move(next_region_));
    former_.insert(former_.end(), {memory_, arrivals_});
    memory_ = next_memory_;
    arrivals_ = next_arrivals_;
    map_ = next_map_;
    channel_bytes_ = channel_bytes_of(map_);
  } else {
    cudaFree(next_memory_);  // nothing has used them
    cudaFree(next_arrivals_);
  }
  next_region_.reset();
  next_memory_ = next_arrivals_ = nullptr;
}

void CarrierTransport::place(StepPlace at, const WindowMap& map, GroupView* view) const {
  const auto shifted = reinterpret_cast<uintptr_t>(bank_of(at.channel)) - map.bank(at.channel, at.bank());
  view->out = reinterpret_cast<std::byte*>(shifted);
  view->out_signals = channel_at(at.channel);
  view->posts = 0;
}

Status CarrierTransport::start(const GroupView& view, const MovedStep& step, const Blocks& blocks, bool at_once) {
  const StepPlace at = step.at;
  void* const stream = step.stream;
  std::byte* const window = window_->data();
  std::byte* const to = blocks.land ? arrivals_at(at.channel) : window + view.map.bank(at.channel, at.bank());
  std::vector<twMove_t> moves;
  const uint64_t signal = kSignalStride;
  const auto add = [&](const std::byte* send, std::byte* recv, const uint64_t& bytes) {
    if (bytes > 0) moves.push_back({sizeof(twMove_t), twMoveBlocks, at.channel, send, recv, &bytes, &bytes});
  };
  for (const Region& region : blocks.regions) {
    add(bank_of(at.channel) + region.begin, to + region.begin, region.bytes);
  }
  add(loads_of(at.channel), window + blocks.loads.begin, blocks.loads.bytes);
  add(channel_at(at.channel), window + map_.signal(at.channel, at.bank(), 0), signal);
  if (carrier_channel_ < 0) {  // one rank alone
    for (const twMove_t& move : moves) {
      TW_CUDA(cudaMemcpyAsync(move.recv, move.send, *move.send_bytes, cudaMemcpyDeviceToDevice,
                              static_cast<cudaStream_t>(stream)));
    }
    return {};
  }
  const auto count = static_cast<int32_t>(moves.size());
  if (calls_.enqueue(calls_.context, carrier_channel_, moves.data(), count, at_once ? 1 : 0, stream) == 0) return {};
  return fail(twSystemError, "the carrier could not begin to move a step's blocks");
}

Status CarrierTransport::join(const GroupView&, const MovedStep& step, const Blocks&) {
  if (carrier_channel_ < 0) return {};
  if (calls_.join(calls_.context, carrier_channel_, step.at.channel, step.stream) == 0) return {};
  return fail(twSystemError, "the carrier could not move a step's blocks");
}

void CarrierTransport::abort() {
  if (carrier_channel_ < 0 || aborted_.exchange(true) || ended()) return;
  calls_.abort(calls_.context, carrier_channel_);
}

}  // namespace tw::cuda
