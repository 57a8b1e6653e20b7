// The sums of a combine, behind its wait: what came back becomes each token's row in the caller's output, and values of
// choices beside it. Takes a CombineCall whose step has ended in data.
//
// What breaks if this changes: the bits of results (S9). Which sum a combine has follows from the group's settings and
// the call's types, alike on all ranks.
#pragma once

#include "core/backend.h"
#include "cpu/fp8_rows.h"
#include "cpu/vector.h"
#include "exchange/choices.h"
#include "exchange/combine.h"

namespace tw::cpu {

// Bytes in which rows are made on their way: one partial that is sent, or the folds of one sum.
inline uint64_t scratch_bytes(const Shape& shape, const Domains& domains) {
  const int32_t rows = std::max(1, domains.most_folds(shape.fan_out()));
  return static_cast<uint64_t>(rows) * shape.most_combine_bytes();
}

// Whether the transport brings the partials of other hosts as folds, one of each.
template <Transport T>
bool folds_between([[maybe_unused]] const T& t, [[maybe_unused]] const Domains& domains) {
  if constexpr (requires { t.folds(domains); }) return t.folds(domains);
  return false;
}

// scratch: scratch_bytes.
template <Transport T>
void sum_returned(T& t, const Context& context, const CombineCall& call, const Routing& routing, const Part& part,
                  std::byte* scratch) {
  const WindowMap& map = call.sent.map;
  const RowTypes types{call.sent.wire, call.out_dtype, call.sent.elements, false, call.sent.scale, call.bias};
  const auto own_row = [&](int32_t slot) { return call.keep_own ? call.rows.at(context.me, slot) : nullptr; };
  if (map.shape().per_expert != 0) {
    receive_choices(t, map, call.at, context.placement, routing, part, types, call.weights, call.out, call.out_stride,
                    sum_rows);
  } else if (context.domains.fold()) {
    const bool folded = folds_between(t, context.domains);
    receive_folds(t, map, call.at, routing, part, types, context.domains, folded, own_row, call.out, call.out_stride,
                  sum_rows, scratch);
  } else {
    receive_combine(t, map, call.at, routing, part, types, own_row, call.out, call.out_stride,
                    call.sent.scales == twScalesNone ? sum_rows : sum_of_fp8);
  }
  if (!call.sent.values) return;
  take_choice_values(t, map, call.at, context.placement, routing, part, call.values.out);
}

}  // namespace tw::cpu
