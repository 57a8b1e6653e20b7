// What copies by expert have in common: where experts are, and what is shown with a row.
//
// Takes ViewParams and a row (place_of); gives its ids, the local expert of an id, and what the caller sees of a
// choice. Also declares the way for few rows (view/few_rows.cu), between which launch_expert_view chooses.
//
// What breaks if this changes: the bits of what the caller sees. kTabled is speed and shared memory alone.
#pragma once

#include "cuda/view/view.cuh"

namespace tw::cuda {

// Gives the ids of a row. `row`: place_of.
__device__ inline const int32_t* ids_of(const ArrivedParams& p, int64_t row) {
  return kept_ids(p.handle, p.group.map.shape().top_k, row);
}

// Where experts are: in shared memory (fill_experts), if there are at most kTabled. local_expert gives the physical
// expert's number on this rank, -1 if it is another rank's or none.
constexpr int kTabled = 4096;
__host__ __device__ constexpr bool is_tabled(const Shape& shape) { return shape.experts <= kTabled; }
__device__ inline int local_expert(const ArrivedParams& p, const uint32_t* table, int32_t id) {
  const auto experts = static_cast<uint32_t>(p.group.map.shape().experts);
  uint32_t expert = kNoExpert;
  if (is_tabled(p.group.map.shape())) {
    expert = table[min(static_cast<uint32_t>(id), experts)];
  } else if (static_cast<uint32_t>(id) < experts) {
    expert = p.group.experts[id];
  }
  return expert_rank(expert) == p.group.me ? expert_slot(expert) : -1;
}

// Shows the caller the k-th choice of a row that stands at `place`.
__device__ inline void show_choice(const ViewParams& p, int64_t row, int k, int expert, int32_t id, uint32_t weight,
                                   int64_t place) {
  if (p.shown.ids != nullptr) show_id(p.shown, place, p.shown.local ? expert : id);
  if (p.shown.weights != nullptr) p.shown.weights[place] = __uint_as_float(weight);
  if (p.origins != nullptr) p.origins[place] = row * p.group.map.shape().top_k + k;
}

// Shows that places [from, to) hold nothing. By `threads` threads.
__device__ inline void show_empty(const ViewParams& p, int64_t from, int64_t to, int thread, int threads) {
  for (int64_t place = from + thread; place < to; place += threads) {
    if (p.shown.ids != nullptr) show_id(p.shown, place, p.shown.invalid);
    if (p.shown.weights != nullptr) p.shown.weights[place] = 0.0f;
    if (p.origins != nullptr) p.origins[place] = -1;
  }
}

// Writes zeros to rows [from, to) of a payload that is wanted. By `threads` threads.
__device__ inline void clear_payload(const ViewParams& p, int q, int64_t from, int64_t to, int thread, int threads) {
  const auto bytes = static_cast<int64_t>(p.group.map.shape().payload_bytes[q]);
  const Columns& columns = p.columns[q];
  if (!columns.wanted() && p.width[q] == 16) {  // with an alignment of 128 rows an expert has 64 such rows on average
    auto* const vectors = reinterpret_cast<uint4*>(p.payloads[q]);
    for (int64_t i = from * (bytes / 16) + thread; i < to * (bytes / 16); i += threads) vectors[i] = {};
    return;
  }
  for (int64_t i = from * bytes + thread; i < to * bytes; i += threads) {
    p.payloads[q][columns.wanted() ? in_columns(columns, i / bytes, static_cast<uint32_t>(i % bytes)) : i] =
        std::byte{0};
  }
}

// The same of all payloads that are wanted.
__device__ inline void clear_rows(const ViewParams& p, int64_t from, int64_t to, int thread, int threads) {
#pragma unroll 1
  for (int q = 0; q < p.group.map.shape().payloads && from < to; ++q) {
    if (p.payloads[q] != nullptr) clear_payload(p, q, from, to, thread, threads);
  }
}

// Ends a grouped layout behind its last expert, at row `end`: shows that the rows there is room for hold nothing, which
// stay as they are, because the cost of a dispatch must follow from what comes, not from what could have come. Columns
// may be longer than there are rows. By all blocks.
__device__ inline void show_beyond(const ViewParams& p, int64_t end) {
  const int64_t share = (p.rows - end + gridDim.x - 1) / static_cast<int64_t>(gridDim.x);
  const int64_t from = end + static_cast<int64_t>(blockIdx.x) * share;
  const auto thread = static_cast<int>(threadIdx.x);
  show_empty(p, from, min(static_cast<int64_t>(p.rows), from + share), thread, kViewThreads);
  for (int q = 0; q < p.group.map.shape().payloads && blockIdx.x == 0; ++q) {
    if (p.payloads[q] == nullptr || !p.columns[q].wanted()) continue;
    clear_payload(p, q, p.rows, p.columns[q].rows, thread, kViewThreads);
  }
}

// Finds where the rows of `experts` experts begin in the grouped of low latency, from row `first` on: total(expert) is
// how many each has, begin[0 .. experts] where they begin and the last of them end. By one whole warp.
template <class Total>
__device__ inline void begin_experts(int32_t* begin, int experts, int32_t first, int32_t alignment, Total&& total) {
#pragma unroll 1
  for (int base = 0; base < experts; base += 32) {
    const int expert = base + lane();
    const int rows = expert < experts ? (total(expert) + alignment - 1) & -alignment : 0;  // a power of two
    const int through = sum_through(rows);
    if (expert < experts) begin[expert] = first + through - rows;
    first += __shfl_sync(~0u, through, 31);
  }
  if (lane() == 0) begin[experts] = first;
}

// Views of few rows have a kernel of their own (view/few_rows.cu). has_few_rows says whether a view is one, if at most
// `blocks` blocks may run; launch_few_rows_view launches it.
bool has_few_rows(const ViewParams& params, int blocks);
int launch_few_rows_view(const ViewParams& params, int blocks, bool early, void* stream);

}  // namespace tw::cuda
