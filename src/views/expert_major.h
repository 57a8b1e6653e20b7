// The layouts by expert, on hosts. expert_major, [L, N*b, ...], has the rows of each local expert packed from 0 on, in
// (source, token) order. grouped, [P, ...], has the same rows in blocks as large as they need to be, padded with zeros.
// A row that several local experts want stands once under each. scatter_expert_major writes a dispatch's outputs from
// the window; ExpertMajorTerms names the rows of a combine's partials.
//
// S9: dispatch and combine walk rows in one order and remember nothing between them, so both must use ExpertPlaces. The
// kernels of src/cuda/view write the same places: a change alters the bits of results.
#pragma once

#include <algorithm>
#include <cstring>

#include "exchange/combine.h"
#include "exchange/routing.h"
#include "views/columns.h"
#include "views/rank_major.h"

namespace tw {

// Walks received rows in (source, slot) order and gives each (row, local expert) its place. Dispatch and combine walk
// alike, so nothing needs to be remembered between them.
class ExpertPlaces {
 public:
  // next: [L], scratch.
  ExpertPlaces(const Shape& shape, const Placement& placement, int32_t me, int32_t local_experts, int32_t* next)
      : shape_(shape), placement_(placement), me_(me), next_(next) {
    std::fill_n(next, local_experts, 0);
  }

  // visit(k, local expert, place) for each local expert of a row, k ascending.
  template <class Visit>
  void each(const Received::Row& meta, Visit&& visit) {
    for (int32_t k = 0; k < shape_.top_k; ++k) {
      const int32_t expert = placement_.local(meta.ids[k], me_);
      if (expert >= 0) visit(k, expert, next_[expert]++);
    }
  }

 private:
  const Shape& shape_;
  const Placement& placement_;
  int32_t me_;
  int32_t* next_;
};

struct ExpertMajorOut {
  const int64_t* first = nullptr;  // grouped: [L + 1] each expert's first row; NULL: by rows_per_expert
  int64_t rows = 0;                // grouped: rows that there is room for, from first[L] on without an expert
  int64_t rows_per_expert = 0;
  std::byte* payloads[kMaxPayloads] = {};  // NULL: not wanted
  Columns columns[kMaxPayloads];
  void* ids = nullptr;
  float* weights = nullptr;
  int64_t* origins = nullptr;        // row * K + k, by source, that the row there was taken from
  int32_t* source_counts = nullptr;  // [L, N]
  int32_t* counts = nullptr;         // [L]

  int64_t begin(int64_t expert) const { return first != nullptr ? first[expert] : expert * rows_per_expert; }

  // Writes row `at` of a payload, which is an expert's; NULL: zeros.
  void place(int q, int64_t at, const std::byte* row, uint64_t bytes, int64_t expert = 0) const {
    if (payloads[q] == nullptr) return;
    if (columns[q].wanted()) {
      return columns[q].place(payloads[q], at + columns[q].shift(expert, rows_per_expert), row, bytes);
    }
    std::byte* const to = payloads[q] + at * static_cast<int64_t>(bytes);
    if (row != nullptr) {
      std::memcpy(to, row, bytes);
    } else {
      std::memset(to, 0, bytes);
    }
  }
};

// Copies received rows to their experts. window_row(q, source, p) says where payload q of a slot lies,
// first_row(source) which row by source a source's first is.
template <class WindowRow, class FirstRow>
void scatter_expert_major(const Shape& shape, const Placement& placement, const Received& received, int32_t me,
                          int32_t local_experts, const IdStyle& style, const ExpertMajorOut& out,
                          WindowRow&& window_row, FirstRow&& first_row) {
  ExpertPlaces places(shape, placement, me, local_experts, out.counts);
  if (out.source_counts != nullptr) std::fill_n(out.source_counts, int64_t{local_experts} * shape.ranks, 0);
  int64_t row = 0;
  for (int32_t source = 0; source < shape.ranks; ++source) {
    for (int32_t p = 0; p < received.counts[source]; ++p, ++row) {
      const Received::Row meta = received.row(row, shape.top_k);
      places.each(meta, [&](int32_t k, int32_t expert, int32_t place) {
        const int64_t at = out.begin(expert) + place;
        for (int q = 0; q < shape.payloads; ++q) {
          out.place(q, at, window_row(q, source, p), shape.payload_bytes[q], expert);
        }
        if (out.ids != nullptr) style.store(out.ids, at, style.space == twIdLocal ? expert : meta.ids[k]);
        if (out.weights != nullptr) out.weights[at] = meta.weights[k];
        if (out.origins != nullptr) out.origins[at] = (first_row(source) + p) * shape.top_k + k;
        if (out.source_counts != nullptr) ++out.source_counts[int64_t{expert} * shape.ranks + source];
      });
    }
  }
  const auto show_empty = [&](int64_t at) {
    if (out.ids != nullptr) style.store(out.ids, at, style.invalid);
    if (out.weights != nullptr) out.weights[at] = 0.0f;
    if (out.origins != nullptr) out.origins[at] = -1;
  };
  for (int32_t expert = 0; expert < local_experts; ++expert) {
    for (int64_t at = out.begin(expert) + out.counts[expert]; at < out.begin(expert + 1); ++at) {
      show_empty(at);
      for (int q = 0; q < shape.payloads && out.first != nullptr; ++q) {
        out.place(q, at, nullptr, shape.payload_bytes[q]);
      }
    }
  }
  if (out.first == nullptr) return;
  for (int64_t at = out.begin(local_experts); at < out.rows; ++at) show_empty(at);
  for (int q = 0; q < shape.payloads; ++q) {  // fills columns beyond the last row
    for (int64_t at = out.rows; at < out.columns[q].rows; ++at) {
      out.place(q, at, nullptr, shape.payload_bytes[q]);
    }
  }
}

// The terms of a combine's partial, or the rows of a combine per expert: the caller's rows of the (token, local expert)
// pairs.
struct ExpertMajorTerms {
  ExpertPlaces& places;
  Grid grid;
  Grid values;  // data NULL: none

  void operator()(int, int32_t, const Received::Row& meta, Terms* terms) const {
    if (values.data != nullptr) std::fill_n(terms->values, TW_MAX_TOP_K, 0.0f);
    places.each(meta, [&](int32_t k, int32_t expert, int32_t place) {
      if (values.data != nullptr) std::memcpy(terms->values + k, values.at(expert, place), sizeof(float));
      terms->rows[terms->count] = grid.at(expert, place);
      terms->weights[terms->count] = meta.weights[k];
      terms->k[terms->count] = k;
      ++terms->count;
    });
  }
};

}  // namespace tw
