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

// Views of few rows have a kernel of their own (view/few_rows.cu). has_few_rows says whether a view is one, if at most
// `blocks` blocks may run; launch_few_rows_view launches it.
bool has_few_rows(const ViewParams& params, int blocks);
int launch_few_rows_view(const ViewParams& params, int blocks, bool early, void* stream);

}  // namespace tw::cuda
