// Index lists, on hosts: by which rows of a rank_major or flat view the experts of this rank work, expert after expert,
// in blocks of one expert each, as products that gather their rows want it. It takes what a dispatch brought
// (Received), and gives the three lists. IndexLists says where they are and how long, for kernels too.
//
// S9: an expert's choices stand in order of source and slot, as its rows do by expert. src/cuda/view/index_lists.cu
// writes the same, and tokenway.h promises it, so that products are the same every time.
#pragma once

#include <algorithm>
#include <cstdint>

#include "exchange/routing.h"

namespace tw {

// The places of lists over so many rows, whatever their routing is: tokenway.h, twGroupIndexCapacity.
constexpr int64_t index_capacity(int64_t rows, int64_t top_k, int64_t local_experts, int64_t block) {
  const int64_t choices = rows * std::min(top_k, local_experts);
  const int64_t begun = std::min(local_experts, choices);
  return (begun + (choices - begun) / block) * block;
}

// The lists of a call. A list that is NULL is not wanted.
struct IndexLists {
  int32_t block = 0;                 // places of a block; 0: no lists
  int32_t none = 0;                  // M * K, what stands where no choice does
  int32_t capacity = 0;              // C
  int32_t* sorted_rows = nullptr;    // [C]
  int32_t* block_experts = nullptr;  // [C / block]
  int32_t* num_sorted = nullptr;     // [1]

  constexpr bool wanted() const { return sorted_rows != nullptr || block_experts != nullptr || num_sorted != nullptr; }
};

// Writes what does not depend on which choices there are: experts of blocks, the filling of blocks, and the end. next:
// [L], how many choices each expert has; it becomes the place of its first.
inline void outline_index_lists(const IndexLists& lists, int32_t local_experts, int32_t* next) {
  int32_t end = 0;
  for (int32_t expert = 0; expert < local_experts; ++expert) {
    const int32_t begin = end;
    const int32_t blocks = next[expert] / lists.block + (next[expert] % lists.block != 0 ? 1 : 0);
    end += blocks * lists.block;
    if (lists.sorted_rows != nullptr) {
      std::fill(lists.sorted_rows + begin + next[expert], lists.sorted_rows + end, lists.none);
    }
    if (lists.block_experts != nullptr) std::fill_n(lists.block_experts + begin / lists.block, blocks, expert);
    next[expert] = begin;
  }
  if (lists.sorted_rows != nullptr) {
    std::fill(lists.sorted_rows + end, lists.sorted_rows + lists.capacity, lists.none);
  }
  if (lists.block_experts != nullptr) {
    std::fill(lists.block_experts + end / lists.block, lists.block_experts + lists.capacity / lists.block, -1);
  }
  if (lists.num_sorted != nullptr) *lists.num_sorted = end;
}

// Writes the lists of what a dispatch brought. first_row(source): the view's row where a source's begin. next: [L],
// scratch.
template <class FirstRow>
void write_index_lists(const Shape& shape, const Placement& placement, const Received& received, int32_t me,
                       int32_t local_experts, const IndexLists& lists, int32_t* next, FirstRow&& first_row) {
  const auto each = [&](auto&& visit) {  // visit(local expert, row * K + k), in order
    int64_t nth = 0;
    for (int32_t source = 0; source < shape.ranks; ++source) {
      for (int32_t p = 0; p < received.counts[source]; ++p, ++nth) {
        const Received::Row meta = received.row(nth, shape.top_k);
        for (int32_t k = 0; k < shape.top_k; ++k) {
          const int32_t expert = placement.local(meta.ids[k], me);
          if (expert >= 0) visit(expert, (first_row(source) + p) * shape.top_k + k);
        }
      }
    }
  };
  std::fill_n(next, local_experts, 0);
  each([&](int32_t expert, int64_t) { ++next[expert]; });
  outline_index_lists(lists, local_experts, next);
  if (lists.sorted_rows == nullptr) return;
  each([&](int32_t expert, int64_t choice) { lists.sorted_rows[next[expert]++] = static_cast<int32_t>(choice); });
}

}  // namespace tw
