// Combine on hosts: one partial per (token, rank) goes back to the token's owner and is summed there. send_combine
// takes what a dispatch brought and the caller's rows, writes partials into the owners' inboxes and publishes the step;
// receive_combine takes the routing and writes the sums.
//
// Publishing before the last row is read breaks S3. The order of terms (k ascending, then ranks ascending), and that
// each sum is rounded once, are the bits of results (S9): kernels and the oracle have the same.
#pragma once

#include <algorithm>
#include <cstring>

#include "exchange/domains.h"
#include "exchange/routing.h"
#include "exchange/step.h"

namespace tw {

// The terms of one partial: rows of the caller, and their weights if any; in a layout by expert whose choices they are;
// and the values of the row's choices, [K], if they are returned beside it.
struct Terms {
  const void* rows[TW_MAX_TOP_K];
  float weights[TW_MAX_TOP_K];
  int32_t k[TW_MAX_TOP_K];
  float values[TW_MAX_TOP_K];
  int count = 0;
};

// The tokens of their owners that one part of a combine sums: [begin, end).
struct Part {
  int32_t begin;
  int32_t end;

  static Part of(const Shape& shape, int32_t number) {
    return {number * shape.part_tokens(), std::min(shape.max_tokens, (number + 1) * shape.part_tokens())};
  }
  bool has(int32_t token) const { return token >= begin && token < end; }
};

// Counts the rows of a part that came from each rank, and so go back to it. counts: [N].
inline void count_part(const Shape& shape, const Received& received, const Part& part, int32_t* counts) {
  for (int64_t at = 0, source = 0; source < shape.ranks; ++source) {
    counts[source] = 0;
    for (int32_t p = 0; p < received.counts[source]; ++p, ++at) {
      counts[source] += part.has(received.row(at, shape.top_k).header->token) ? 1 : 0;
    }
  }
}

// Calls visit(token, position, from) for each row of a part that this rank has sent, and that comes back.
template <class Visit>
void each_returning(const Routing& routing, const Part& part, Visit&& visit) {
  for (int32_t token = part.begin; token < std::min(part.end, routing.tokens); ++token) {
    for (int32_t position = 0; position < routing.fan_out(token); ++position) {
      const Destination& from = routing.destinations[routing.first[token] + position];
      if (from.slot < routing.send_counts[from.rank]) visit(token, position, from);
    }
  }
}

// From what the sums of tokens start, [T, elements]: the term before all others, unweighted. data NULL: from the first
// of the others.
struct Bias {
  const std::byte* data = nullptr;
  int64_t stride = 0;  // in bytes, from one token to the next
  twDtype_t dtype = twFloat32;
};

// How rows are typed on their way.
struct RowTypes {
  twDtype_t from;
  twDtype_t to;
  int64_t elements;
  bool weighted;
  float scale = 0.0f;  // of rows as e4m3: of all elements; 0: each block of 128 has its own (layout/fp8_rows.h)
  Bias bias = {};      // data: the row of the sum that is made

  // The same for the sum of one token, where `bias` has the rows of all.
  RowTypes of(int64_t token) const {
    RowTypes types = *this;
    if (bias.data != nullptr) types.bias.data += token * bias.stride;
    return types;
  }
};

// Writes the partial of each received row of a part into its owner's inbox, at (token, position of this rank), and
// publishes the step with `counts`, which count_part gives.
// `terms_of(source, p, row, &terms)` names the rows of a partial, k ascending, and is asked in (source, slot) order,
// for rows of other parts too; `sum(out, rows, weights, count, types)` is sum_rows for the machine. `keep_own`: this
// rank's own partials stay where they are, and receive_combine reads them there. `values`: those of choices go beside
// the partials, this rank's own too.
template <Transport T, class TermsOf, class Sum>
void send_combine(T& t, const WindowMap& map, StepPlace at, const Received& received, const Part& part,
                  const int32_t* counts, const RowTypes& types, uint64_t note, TermsOf&& terms_of, Sum&& sum,
                  std::byte* scratch, bool keep_own, bool values = false) {
  const Shape& shape = map.shape();
  Terms terms;
  int64_t row = 0;
  for (int source = 0; source < shape.ranks; ++source) {
    for (int32_t p = 0; p < received.counts[source]; ++p, ++row) {
      const bool stays = keep_own && source == t.rank();
      if (stays && !values) continue;
      const Received::Row meta = received.row(row, shape.top_k);
      terms.count = 0;
      terms_of(source, p, meta, &terms);
      if (!part.has(meta.header->token)) continue;
      const RowHeader place{meta.header->token - part.begin, meta.header->position};
      if (values) {
        t.put(source, map.inbox_values(at.channel, at.bank(), place.token, place.position), terms.values,
              choice_bytes(shape.top_k));
      }
      if (stays) continue;
      const void* partial = scratch;
      if (terms.count == 1 && !types.weighted && types.from == types.to) {
        partial = terms.rows[0];  // a sum of one term is that term, bit for bit
      } else {
        sum(scratch, terms.rows, types.weighted ? terms.weights : nullptr, terms.count, types);
      }
      t.put(source, map.inbox(at.channel, at.bank(), place.token, place.position), partial, shape.combine_bytes);
    }
  }
  // Published only now, to all at once: a peer that sees this signal may send the next step into the bank that the
  // caller's rows may lie in (S3).
  publish_step(t, map, at, Mode::kCombine, note, [&](int peer) { return counts[peer]; });
}

// Gives a partial that came back for a token of a part. `own_row(slot)` says where this rank's own partial of a slot
// was kept, NULL if it was put into the inbox like the others.
template <Transport T, class OwnRow>
[[gnu::always_inline]] inline const void* returned_row(T& t, const WindowMap& map, StepPlace at, const Part& part,
                                                       int32_t token, int32_t position, const Destination& from,
                                                       OwnRow&& own_row) {
  const void* const own = from.rank == t.rank() ? own_row(from.slot) : nullptr;
  return own != nullptr ? own : t.returned(at, map.inbox(at.channel, at.bank(), token - part.begin, position));
}

// Sums what came back for a part, over ranks ascending (the order of positions), behind the token's bias if there is
// one; rows that were not sent do not count.
// Needs a successful await_step. own_row: as in returned_row.
template <Transport T, class OwnRow, class Sum>
void receive_combine(T& t, const WindowMap& map, StepPlace at, const Routing& routing, const Part& part,
                     const RowTypes& types, OwnRow&& own_row, std::byte* out, int64_t out_stride, Sum&& sum) {
  const void* rows[TW_MAX_TOP_K];
  for (int32_t token = part.begin; token < std::min(part.end, routing.tokens); ++token) {
    int32_t count = 0;
    each_returning(routing, {token, token + 1}, [&](int32_t, int32_t position, const Destination& from) {
      rows[count++] = returned_row(t, map, at, part, token, position, from, own_row);
    });
    sum(out + token * out_stride, rows, nullptr, count, types.of(token));
  }
}

// The same by domain: folds, which are rounded to the type that travels, are summed over domains ascending. `folds`:
// room for Domains::most_folds(fan_out) rows. `folded`: partials of other domains than this rank's have come as folds,
// each at the place of the domain's first rank.
template <Transport T, class OwnRow, class Sum>
void receive_folds(T& t, const WindowMap& map, StepPlace at, const Routing& routing, const Part& part,
                   const RowTypes& types, const Domains& domains, bool folded, OwnRow&& own_row, std::byte* out,
                   int64_t out_stride, Sum&& sum, std::byte* folds) {
  const RowTypes travels{types.from, types.from, types.elements, false};
  const auto fold = [&](std::byte* to, const void* const* rows, int count) { sum(to, rows, nullptr, count, travels); };
  const void* rows[TW_MAX_TOP_K];
  int32_t ranks[TW_MAX_TOP_K];
  for (int32_t token = part.begin; token < std::min(part.end, routing.tokens); ++token) {
    int32_t count = 0;
    each_returning(routing, {token, token + 1}, [&](int32_t, int32_t position, const Destination& from) {
      const bool more = count > 0 && domains.of(ranks[count - 1]) == domains.of(from.rank);
      if (folded && more && domains.of(from.rank) != domains.of(t.rank())) return;
      ranks[count] = from.rank;
      rows[count++] = returned_row(t, map, at, part, token, position, from, own_row);
    });
    const int32_t terms = fold_terms(domains, rows, ranks, count, folds, map.shape().combine_bytes, fold);
    sum(out + token * out_stride, rows, nullptr, terms, types.of(token));
  }
}

// Takes the values of choices that came back for a part, out [T, K]: each from the rank that holds the chosen expert, 0
// where that has returned none. Needs a successful await_step.
template <Transport T>
void take_choice_values(T& t, const WindowMap& map, StepPlace at, const Placement& placement, const Routing& routing,
                        const Part& part, float* out) {
  const int32_t top_k = map.shape().top_k;
  for (int32_t token = part.begin; token < std::min(part.end, routing.tokens); ++token) {
    const int64_t first = static_cast<int64_t>(token) * top_k;
    std::fill_n(out + first, top_k, 0.0f);
    each_returning(routing, {token, token + 1}, [&](int32_t, int32_t position, const Destination& from) {
      const std::byte* const values = t.local(map.inbox_values(at.channel, at.bank(), token - part.begin, position));
      for (int32_t k = 0; k < top_k; ++k) {
        const int32_t id = routing.ids[first + k];
        if (id < 0 || placement.rank[id] != from.rank) continue;
        std::memcpy(out + first + k, values + choice_bytes(k), sizeof(float));
      }
    });
  }
}

}  // namespace tw
