// The layouts by rank, on hosts. rank_major, [N, b, ...], is the window as it is, and flat, [R', ...], is the window of
// an exact layout. Payloads need no work; ids and weights are unpacked from the metadata for the caller. It takes what
// a dispatch brought (Received), and gives ids, weights and, for a combine, the terms of partials. The kernels of
// src/cuda/view write the same: a change alters the bits of results, and RankMajorTerms the order of a weight's sum
// (S9).
#pragma once

#include <cstdint>
#include <cstring>

#include "exchange/combine.h"
#include "exchange/routing.h"

namespace tw {

// How received ids are shown to the caller.
struct IdStyle {
  twDtype_t dtype = twInt32;
  twIdSpace_t space = twIdLocal;
  int32_t invalid = -1;

  int32_t show(int32_t id, const Placement& placement, int32_t me) const {
    const int32_t shown = space == twIdLocal ? placement.local(id, me) : id;
    return shown < 0 ? invalid : shown;
  }
  void store(void* ids, int64_t at, int32_t value) const {
    if (dtype == twInt64) {
      static_cast<int64_t*>(ids)[at] = value;
    } else {
      static_cast<int32_t*>(ids)[at] = value;
    }
  }
};

// The caller's rows in blocks: by source (rank_major, flat) or by local expert (expert_major, grouped).
struct Grid {
  const std::byte* data = nullptr;
  int64_t block_stride = 0;  // bytes
  int64_t row_stride = 0;
  const int64_t* first = nullptr;  // in exact layouts: the row where each block begins

  const void* at(int64_t block, int64_t row) const {
    if (first != nullptr) return data + (first[block] + row) * row_stride;
    return data + block * block_stride + row * row_stride;
  }
};

// Fills rank_major's ids [N, b, K] and weights [N, b, K]; either may be NULL.
inline void unpack_rank_major(const Shape& shape, const Placement& placement, const Received& received, int32_t me,
                              int32_t bound, const IdStyle& style, void* ids, float* weights) {
  int64_t row = 0;
  for (int32_t source = 0; source < shape.ranks; ++source) {
    for (int32_t p = 0; p < bound; ++p) {
      const bool filled = p < received.counts[source];
      const Received::Row meta = filled ? received.row(row++, shape.top_k) : Received::Row{};
      const int64_t at = (static_cast<int64_t>(source) * bound + p) * shape.top_k;
      for (int32_t k = 0; k < shape.top_k; ++k) {
        if (ids != nullptr) style.store(ids, at + k, filled ? style.show(meta.ids[k], placement, me) : style.invalid);
        if (weights != nullptr) weights[at + k] = filled ? meta.weights[k] : 0.0f;
      }
    }
  }
}

// Fills flat's ids [R', K] and weights [R', K]; either may be NULL. first: [N + 1] where each source's rows begin.
inline void unpack_flat(const Shape& shape, const Placement& placement, const Received& received, int32_t me,
                        const int64_t* first, const IdStyle& style, void* ids, float* weights) {
  int64_t row = 0;
  for (int32_t source = 0; source < shape.ranks; ++source) {
    for (int64_t p = 0; p < first[source + 1] - first[source]; ++p) {
      const bool filled = p < received.counts[source];  // else its source has failed
      const Received::Row meta = filled ? received.row(row++, shape.top_k) : Received::Row{};
      const int64_t at = (first[source] + p) * shape.top_k;
      for (int32_t k = 0; k < shape.top_k; ++k) {
        if (ids != nullptr) style.store(ids, at + k, filled ? style.show(meta.ids[k], placement, me) : style.invalid);
        if (weights != nullptr) weights[at + k] = filled ? meta.weights[k] : 0.0f;
      }
    }
  }
}

// The terms of a combine's partial: the caller's row is already the sum over the local experts; under topk weighting it
// is scaled by the sum of their weights.
struct RankMajorTerms {
  const Shape& shape;
  const Placement& placement;
  int32_t me;
  Grid grid;
  Grid values;  // data NULL: none

  void operator()(int source, int32_t p, const Received::Row& meta, Terms* terms) const {
    if (values.data != nullptr) std::memcpy(terms->values, values.at(source, p), choice_bytes(shape.top_k));
    bool first = true;
    float weight = 0.0f;
    for (int32_t k = 0; k < shape.top_k; ++k) {
      if (placement.local(meta.ids[k], me) < 0) continue;
      weight = first ? meta.weights[k] : weight + meta.weights[k];
      first = false;
    }
    terms->rows[0] = grid.at(source, p);
    terms->weights[0] = weight;
    terms->count = 1;
  }
};

}  // namespace tw
