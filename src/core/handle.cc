// Lays a handle's arrays out in its block, 64-byte aligned, and tells the block's size. Sizes follow from the group's
// maxima alone, so that a block fits any routing of the group. An array that is too small here is overrun by the
// largest step.
#include "core/handle.h"

#include <algorithm>

namespace tw {

uint64_t place_arrays(const Shape& shape, int32_t local_experts, int id_bytes, bool on_device, std::byte* block,
                      HandleArrays* arrays) {
  uint64_t at = 0;
  const auto take = [&](uint64_t bytes) {
    std::byte* const here = block == nullptr ? nullptr : block + at;
    at = (at + bytes + 63) / 64 * 64;
    return here;
  };
  const auto place = [&]<class T>(T*& array, uint64_t count) { array = reinterpret_cast<T*>(take(count * sizeof(T))); };
  const uint64_t ranks = shape.ranks;
  const uint64_t experts = local_experts;
  const uint64_t tokens = shape.max_tokens;
  const uint64_t pairs = tokens * shape.top_k;
  const auto rows = static_cast<uint64_t>(shape.handle_rows());
  // Arrays of what is sent.
  place(arrays->routing.ids, pairs);
  place(arrays->routing.weights, pairs);
  place(arrays->routing.first, tokens + 1);
  place(arrays->routing.destinations, tokens * shape.fan_out());
  place(arrays->routing.send_counts, ranks);
  // Arrays of what arrived.
  place(arrays->received.counts, ranks);
  place(arrays->experts.counts, experts);
  place(arrays->received.meta, rows * meta_bytes(shape.top_k));
  place(arrays->shown.counts, ranks);
  arrays->shown.ids = take(rows * shape.top_k * id_bytes);
  place(arrays->shown.weights, rows * shape.top_k);
  const uint64_t slots = !shape.exact() || shape.has_both_modes() ? 1 : 0;
  place(arrays->experts.slot_begin, slots * (experts + 1));
  place(arrays->shown.slot_offsets, slots * (experts + 1));
  const uint64_t device = on_device ? 1 : 0;
  place(arrays->device.places, device * rows * shape.top_k);
  place(arrays->device.status, device);
  place(arrays->device.overflow, device);
  place(arrays->device.digest, device);
  place(arrays->map.choices, shape.counts_loads != 0 ? shape.choices() : 0);
  const uint64_t exact = shape.exact() ? 1 : 0;
  place(arrays->counts.sent, exact * ranks * ranks);
  place(arrays->counts.experts, exact * experts);
  place(arrays->counts.begin, exact * ranks);
  place(arrays->counts.source, exact * (ranks + 1));
  place(arrays->experts.begin, exact * (experts + 1));
  place(arrays->shown.offsets, exact * (experts + 1));
  place(arrays->device.metadata_step, exact * device);
  place(arrays->device.marks, exact * device * (tokens + 31) / 32 * ranks);
  // Always: combines may take parts once the group has grown.
  place(arrays->device.part_counts, exact * device * (kMaxParts + 1) * 2 * ranks);
  place(arrays->device.slot_meta, device * ranks * shape.low_latency_tokens * meta_bytes(shape.top_k));
  place(arrays->counts.receive_offset, shape.leases() ? ranks * shape.payloads : 0);
  place(arrays->all.sums, device * kDigestBlocks);
  return at;
}

int32_t default_bound(const Shape& shape, const twHandle* handle) {
  // In high throughput a bound sizes nothing, and ranks with handles of before and after a growth may exchange.
  if (handle == nullptr || shape.exact()) return shape.default_bound();
  return std::min(handle->max_tokens, shape.default_bound());
}

}  // namespace tw
