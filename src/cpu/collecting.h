// Gathers and reduces as the CPU's backends make them: a CollectiveCall becomes counts, rows and places of
// exchange/collective.h, and what came is shown to the caller. After an error counts and offsets are 0, and sums are
// NaN.
//
// What breaks if this changes: ranks must count the rows of a call alike, or one waits for rows that nobody sends.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "core/backend.h"
#include "cpu/outline.h"
#include "cpu/vector.h"
#include "exchange/collective.h"

namespace tw::cpu {

// How many rows of a gather or reduce rank `me` sends to a rank. Wherever the given sizes are, the host knows them.
inline int32_t rows_for(const CollectiveCall& call, int me, int rank) {
  if (!call.all_sizes) return call.reduces ? call.bound : call.sizes[0];
  return call.sizes[call.reduces ? rank : me];
}

// For a reduce of flat tensors: the row where each rank's rows begin.
inline std::vector<int64_t> first_rows(const CollectiveCall& call, int ranks) {
  std::vector<int64_t> first(static_cast<size_t>(ranks), 0);
  for (int rank = 1; rank < ranks && call.reduces && call.flat; ++rank) {
    first[rank] = first[rank - 1] + call.sizes[rank - 1];
  }
  return first;
}

inline const std::byte* row_at(const CollectiveCall& call, int q, int64_t row, int rank) {
  const CollectiveTensor& tensor = call.tensors[q];
  return tensor.in + rank * tensor.block_stride + row * tensor.row_stride;
}

// counts: [N], scratch.
template <class T>
void send_collective(T& transport, const Context& context, const CollectiveCall& call, int32_t* counts) {
  const int me = context.me;
  for (int rank = 0; rank < transport.ranks(); ++rank) counts[rank] = rows_for(call, me, rank);
  const Area area = call.reduces ? Area::kStraight : Area::kInbox;
  transport.begin(call.at, {counts, call.places.tensors, call.places.rows_bytes(), 0, area}, call.send_only);
  const std::vector<int64_t> first = first_rows(call, transport.ranks());
  tw::send_collective(
      transport, context.map, call.at, call.places, call.mode(), collective_note(call.bound, call.digest),
      [&](int rank) { return rows_for(call, me, rank); },
      [&](int q, int rank, int32_t i) { return row_at(call, q, first[rank] + i, rank); }, call.views || call.in_window);
}

template <class T>
void sum(T& transport, const Context& context, const CollectiveCall& call, bool good) {
  const int32_t rows = call.sizes[call.all_sizes ? context.me : 0];
  const int64_t first = first_rows(call, transport.ranks())[context.me];
  std::vector<const void*> terms(static_cast<size_t>(transport.ranks()));
  for (int32_t q = 0; q < call.places.tensors; ++q) {
    const CollectiveTensor& tensor = call.tensors[q];
    if (!good) {
      fill_nan(tensor.out, tensor.to, rows * tensor.elements);
      continue;
    }
    const RowTypes types{tensor.from, tensor.to, tensor.elements, false};
    const auto own_row = [&](int32_t of, int32_t i) -> const void* {
      return call.in_window ? nullptr : row_at(call, of, first + i, context.me);
    };
    sum_collective(transport, context.map, call.at, call.places, q, rows, types, own_row, tensor.out, tensor.out_stride,
                   terms.data(), sum_rows);
  }
}

// Copies the rows of a source to where the caller wants them, from `row` on.
template <class T>
void show(T& transport, const Context& context, const CollectiveCall& call, int32_t q, int32_t source, int64_t row,
          uint64_t rows) {
  const CollectiveTensor& tensor = call.tensors[q];
  const uint64_t bytes = call.places.row_bytes[q];
  if (tensor.out == nullptr || rows == 0) return;
  std::byte* const to = tensor.out + row * tensor.out_stride;
  if (source != context.me || call.in_window) {
    const uint64_t bank = context.map.bank(call.at.channel, call.at.bank());
    std::memcpy(to, transport.local(bank + call.places.row(q, source, 0)), rows * bytes);
    return;
  }
  if (to == tensor.in) return;  // in place
  for (uint64_t i = 0; i < rows; ++i) {
    std::memcpy(to + i * bytes, tensor.in + static_cast<int64_t>(i) * tensor.row_stride, bytes);
  }
}

// counts: [N], of the rows that came.
template <class T>
void gather(T& transport, const Context& context, const CollectiveCall& call, const int32_t* counts, bool good) {
  int32_t begin = 0;
  for (int32_t source = 0; source < transport.ranks(); ++source) {
    if (call.offsets != nullptr) call.offsets[source] = begin;
    if (call.counts != nullptr) call.counts[source] = counts[source];
    const int64_t row = call.flat ? begin : int64_t{source} * call.bound;
    for (int32_t q = 0; q < call.places.tensors && good; ++q) {
      show(transport, context, call, q, source, row, static_cast<uint64_t>(counts[source]));
    }
    begin += counts[source];
  }
  if (call.offsets != nullptr) call.offsets[transport.ranks()] = begin;
}

// counts: [N], scratch.
template <class T>
StepEnd finish_collective(T& transport, const Context& context, const CollectiveCall& call, TimePoint deadline,
                          int32_t* counts) {
  StepEnd end = await_step(transport, context.map, call.at, call.mode(), collective_note(call.bound, call.digest),
                           deadline, counts);
  for (int peer = 0; peer < transport.ranks() && end.code == twSuccess; ++peer) {
    if (!call.reduces && !call.all_sizes) continue;
    // Ranks give the same sizes: else the digests would differ, and the step would have failed.
    const int32_t told = call.reduces ? rows_for(call, context.me, context.me) : call.sizes[peer];
    if (counts[peer] != told) end = {twInternalError, context.me, {}, 0};
  }
  if (end.code != twSuccess) std::fill_n(counts, transport.ranks(), 0);
  if (call.reduces) {
    sum(transport, context, call, end.code == twSuccess);
  } else {
    gather(transport, context, call, counts, end.code == twSuccess);
  }
  return end;
}

}  // namespace tw::cpu
