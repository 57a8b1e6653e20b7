// Gathers and reduces on hosts: the exchange with the set "every rank". Both send rows for each rank into this rank's
// places there (layout/collective_map.h); a gather's rows are the same for all. The caller gives counts and rows by
// function, and a transport; it gets the step published (send_collective), and sums (sum_collective).
//
// Publishing before the last row is read breaks S3 and before it is written S4; another order of the sum changes the
// bits of results (S9).
#pragma once

#include <cstring>

#include "exchange/combine.h"
#include "exchange/notes.h"
#include "layout/collective_map.h"

namespace tw {

// Writes the rows of a step and publishes it. Never waits: S2 has made the bank free. count(rank): how many rows go to
// a rank; row_at(q, rank, i): the i-th of them. `own`: this rank's rows go into its own window too.
template <Transport T, class Count, class RowAt>
void send_collective(T& t, const WindowMap& map, StepPlace at, const CollectiveMap& places, Mode mode, uint64_t note,
                     Count&& count, RowAt&& row_at, bool own) {
  const uint64_t bank = map.bank(at.channel, at.bank());
  for (int32_t q = 0; q < places.tensors; ++q) {
    const auto put = [&](int rank, int32_t i) {
      if (rank == t.rank() && !own) return;
      t.put_row(rank, bank + places.row(q, t.rank(), i), row_at(q, rank, i), places.row_bytes[q]);
    };
    // A row that all get is put to all at once: it is read from memory once and from the cache after that. Rows of one
    // rank follow each other as they lie there, so that a transport may move them in one piece.
    const int32_t together = mode == Mode::kGather ? count(t.rank()) : 1;
    for (int32_t first = 0; first < together; ++first) {
      for (int turn = 1; turn <= t.ranks(); ++turn) {
        const int rank = (t.rank() + turn) % t.ranks();
        const int32_t end = mode == Mode::kGather ? first + 1 : count(rank);
        for (int32_t i = first; i < end; ++i) put(rank, i);
      }
    }
  }
  // Published only now, to all at once: rows may lie in the other bank (S3).
  publish_step(t, map, at, mode, note, count);
}

// Sums this rank's rows: row i is the sum over ranks ascending of what each has for it. own_row(q, i): this rank's row,
// NULL if it is in the window like the others'. Needs a successful await_step. `rows`: [N], scratch.
template <Transport T, class OwnRow, class Sum>
void sum_collective(T& t, const WindowMap& map, StepPlace at, const CollectiveMap& places, int32_t q, int32_t count,
                    const RowTypes& types, OwnRow&& own_row, std::byte* out, int64_t out_stride, const void** rows,
                    Sum&& sum) {
  const uint64_t bank = map.bank(at.channel, at.bank());
  for (int32_t i = 0; i < count; ++i) {
    for (int32_t source = 0; source < t.ranks(); ++source) {
      const void* const own = source == t.rank() ? own_row(q, i) : nullptr;
      rows[source] = own != nullptr ? own : t.local(bank + places.row(q, source, i));
    }
    sum(out + i * out_stride, rows, nullptr, t.ranks(), types);
  }
}

}  // namespace tw
