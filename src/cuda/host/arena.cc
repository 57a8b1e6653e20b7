// The states that the groups of an arena share on a device: arena.h tells what they are.
//
// What breaks if this changes: memory that is pinned or freed while a peer waits for this rank may hold both up, so it
// comes and goes on the arena's own stream (S6).
#include "cuda/host/arena.h"

#include <algorithm>

#include "cuda/host/tables.h"

namespace tw::cuda {

DeviceArena::~DeviceArena() {
  if (control != nullptr) control->end_watch();
  staged.reset();
  const OutsideCaptures outside;
  if (stream_ == nullptr) return;
  if (memory_ != nullptr) cudaFreeAsync(memory_, stream_);
  cudaStreamSynchronize(stream_);
  cudaStreamDestroy(stream_);
}

Status DeviceArena::make(const Context& context, const std::vector<std::byte*>& windows) {
  const std::vector<ControlPage*>& pages = control->on_device();
  Tables tables;
  const size_t windows_at = tables.place(windows.data(), sizeof(std::byte*) * windows.size());
  const size_t pages_at = tables.place(pages.data(), sizeof(ControlPage*) * pages.size());
  const size_t counter_at = tables.place(nullptr, sizeof(uint32_t));
  const size_t state_at = tables.place(nullptr, sizeof(DeviceState));
  std::vector<ChannelState> channels(static_cast<size_t>(context.map.shape().channels), ChannelState{});
  for (ChannelState& channel : channels) channel.step = context.first_step;
  const size_t channels_at = tables.place(channels.data(), sizeof(ChannelState) * channels.size());
  TW_CUDA(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
  TW_RETURN_IF_FAILED(tables.copy_to_device(stream_, &memory_));
  std::copy_n(windows.begin(), std::min<size_t>(windows.size(), kNear), shared_.near_windows);
  shared_.windows = reinterpret_cast<std::byte* const*>(memory_ + windows_at);
  shared_.pages = reinterpret_cast<ControlPage* const*>(memory_ + pages_at);
  shared_.state = reinterpret_cast<DeviceState*>(memory_ + state_at);
  shared_.channels = reinterpret_cast<ChannelState*>(memory_ + channels_at);
  counter_ = reinterpret_cast<uint32_t*>(memory_ + counter_at);
  return {};
}

void DeviceArena::fill(GroupView* view) const {
  std::copy_n(shared_.near_windows, kNear, view->near_windows);
  view->windows = shared_.windows;
  view->pages = shared_.pages;
  view->state = shared_.state;
  view->channels = shared_.channels;
}

Status DeviceArena::with_counter(uint32_t* count, const std::function<Status(uint32_t*, cudaStream_t)>& run) {
  TW_CUDA(cudaMemsetAsync(counter_, 0, sizeof *counter_, stream_));
  TW_RETURN_IF_FAILED(run(counter_, stream_));
  TW_CUDA(cudaMemcpyAsync(count, counter_, sizeof *count, cudaMemcpyDeviceToHost, stream_));
  TW_CUDA(cudaStreamSynchronize(stream_));
  return {};
}

void DeviceArena::stop_kernels() {
  cudaMemsetAsync(&shared_.state->sticky, 1, sizeof shared_.state->sticky, stream_);  // any value but 0 will do
  (void)cudaGetLastError();
}

bool DeviceArena::take(Reports& from, const GroupView& view, Report* report) {
  const auto found = from.find(reinterpret_cast<uintptr_t>(view.experts));
  if (found == from.end()) return false;
  *report = found->second;
  from.erase(found);
  return true;
}

}  // namespace tw::cuda
