#include "core/handle.h"

namespace tw {

HandleMap::HandleMap(const Shape& shape, int32_t local_experts, int id_bytes, bool on_device) {
  uint64_t at = 0;
  const auto place = [&](uint64_t count, uint64_t size) {
    const uint64_t begin = at;
    at = (at + count * size + 63) / 64 * 64;
    return begin;
  };
  const uint64_t tokens = shape.max_tokens;
  const uint64_t pairs = tokens * shape.top_k;
  const auto rows = static_cast<uint64_t>(shape.most_rows());
  ids = place(pairs, sizeof(int32_t));
  weights = place(pairs, sizeof(float));
  first = place(tokens + 1, sizeof(int64_t));
  destinations = place(tokens * shape.fan_out(), sizeof(Destination));
  send_counts = place(shape.ranks, sizeof(int32_t));
  counts = place(shape.ranks, sizeof(int32_t));
  expert_counts = place(local_experts, sizeof(int32_t));
  meta = place(rows, meta_bytes(shape.top_k));
  shown_counts = place(shape.ranks, sizeof(int32_t));
  shown_ids = place(rows * shape.top_k, id_bytes);
  shown_weights = place(rows * shape.top_k, sizeof(float));
  places = place(on_device ? rows * shape.top_k : 0, sizeof(ExpertRow));
  status = place(on_device ? 1 : 0, sizeof(int32_t));
  overflow = place(on_device ? 1 : 0, sizeof(int32_t));
  digest = place(on_device ? 1 : 0, sizeof(uint32_t));
  choices = place(shape.counts_loads != 0 ? shape.choices() : 0, sizeof(int32_t));
  const uint64_t exact = shape.exact() ? 1 : 0;
  counts_sent = place(exact * shape.ranks * shape.ranks, sizeof(int32_t));
  counts_experts = place(exact * local_experts, sizeof(int32_t));
  counts_begin = place(exact * shape.ranks, sizeof(int64_t));
  counts_source = place(exact * (shape.ranks + 1), sizeof(int64_t));
  expert_begin = place(exact * (local_experts + 1), sizeof(int64_t));
  offsets = place(exact * (local_experts + 1), sizeof(int32_t));
  landing = place(shape.leases() ? static_cast<uint64_t>(shape.ranks) * shape.payloads : 0, sizeof(uint64_t));
  bytes = at;
}

}  // namespace tw
