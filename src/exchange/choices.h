// Combine per expert, on hosts: a row for each (token, k) goes back to the token's owner as the expert made it, and is
// weighted and summed there. send_choices and receive_choices are to such a combine what send_combine and
// receive_combine (exchange/combine.h) are to one per rank: the same step, signals and counts, with K places for a
// token in the inbox instead of one for each of its ranks.
//
// Terms are added over k ascending, so no sum knows which rank made which row: the bits depend on neither the ranks nor
// the placement (docs/PROTOCOL.md, Order of summation). What breaks if this changes: that promise, and S3, S9 as in
// combine.h; a row that was not sent must be no term, as its place holds an earlier step's.
#pragma once

#include "exchange/combine.h"

namespace tw {

// Where the owner of tokens has the weights by which it multiplies rows that return per expert, [T, K]; a token's lie
// together. data NULL: there are none.
struct OwnerWeights {
  const float* data = nullptr;
  int64_t stride = 0;  // in elements, from one token to the next

  const float* of(int64_t token) const { return data + token * stride; }
};

// Counts the choices of a part that this rank serves, by their owners. counts: [N].
inline void count_choices_of_part(const Shape& shape, const Placement& placement, int32_t me, const Received& received,
                                  const Part& part, int32_t* counts) {
  for (int64_t at = 0, source = 0; source < shape.ranks; ++source) {
    counts[source] = 0;
    for (int32_t p = 0; p < received.counts[source]; ++p, ++at) {
      const Received::Row row = received.row(at, shape.top_k);
      if (!part.has(row.header->token)) continue;
      for (int32_t k = 0; k < shape.top_k; ++k) counts[source] += placement.local(row.ids[k], me) >= 0 ? 1 : 0;
    }
  }
}

// Writes the rows of a part's choices into their owners' inboxes, at (token, k), rounded to the type that travels, and
// publishes the step with `counts`, which count_part gives. terms_of, sum, scratch and values: as in send_combine; each
// value goes beside its row.
template <Transport T, class TermsOf, class Sum>
void send_choices(T& t, const WindowMap& map, StepPlace at, const Received& received, const Part& part,
                  const int32_t* counts, const RowTypes& types, uint64_t note, TermsOf&& terms_of, Sum&& sum,
                  std::byte* scratch, bool values) {
  const Shape& shape = map.shape();
  Terms terms;
  int64_t row = 0;
  for (int source = 0; source < shape.ranks; ++source) {
    for (int32_t p = 0; p < received.counts[source]; ++p, ++row) {
      const Received::Row meta = received.row(row, shape.top_k);
      terms.count = 0;
      terms_of(source, p, meta, &terms);
      if (!part.has(meta.header->token)) continue;
      const RowHeader place{meta.header->token - part.begin, meta.header->position};
      for (int j = 0; j < terms.count; ++j) {
        const int32_t k = terms.k[j];
        const void* travels = terms.rows[j];
        if (types.from != types.to) {
          sum(scratch, terms.rows + j, nullptr, 1, types);  // a sum of one term: the row, rounded
          travels = scratch;
        }
        t.put(source, map.choice_inbox(at.channel, at.bank(), place.token, k), travels, shape.combine_bytes);
        if (!values) continue;
        t.put(source, map.inbox_values(at.channel, at.bank(), place.token, place.position) + choice_bytes(k),
              terms.values + k, sizeof(float));
      }
    }
  }
  publish_step(t, map, at, Mode::kCombine, note, [&](int peer) { return counts[peer]; });  // S3, as in send_combine
}

// Whether the rank that serves the choice of an id has returned its row: whether the token's row had gone there.
inline bool has_returned(const Placement& placement, const Routing& routing, int32_t token, int32_t id) {
  if (id < 0) return false;
  for (int32_t position = 0; position < routing.fan_out(token); ++position) {
    const Destination& to = routing.destinations[routing.first[token] + position];
    if (to.rank == placement.rank[id]) return to.slot < routing.send_counts[to.rank];
  }
  return false;
}

// Sums what came back for a part over k ascending, each row times its weight where there are some, behind the token's
// bias if there is one. Needs a successful await_step.
template <Transport T, class Sum>
void receive_choices(T& t, const WindowMap& map, StepPlace at, const Placement& placement, const Routing& routing,
                     const Part& part, const RowTypes& types, const OwnerWeights& given, std::byte* out,
                     int64_t out_stride, Sum&& sum) {
  const int32_t top_k = map.shape().top_k;
  const void* rows[TW_MAX_TOP_K];
  float weights[TW_MAX_TOP_K];
  for (int32_t token = part.begin; token < std::min(part.end, routing.tokens); ++token) {
    int count = 0;
    for (int32_t k = 0; k < top_k; ++k) {
      if (!has_returned(placement, routing, token, routing.ids[int64_t{token} * top_k + k])) continue;
      if (given.data != nullptr) weights[count] = given.of(token)[k];
      rows[count++] = t.returned(at, map.choice_inbox(at.channel, at.bank(), token - part.begin, k));
    }
    sum(out + token * out_stride, rows, given.data != nullptr ? weights : nullptr, count, types.of(token));
  }
}

}  // namespace tw
