// Reading what callers give: structs of any age, tensors of any shape. A check takes the caller's struct and gives a
// call of core/backend.h; what passes is right, and nothing behind it checks again. read_struct and write_struct keep
// the ABI: they must never touch bytes beyond the caller's `size`.
#pragma once

#include <cstring>
#include <list>
#include <vector>

#include "core/group.h"

namespace tw::api {

class Extents;  // rows.h

// Copies a caller's struct over one that holds the defaults. Smaller (older) structs are accepted; larger ones if the
// bytes that this library does not know are zero. `given` and `known` may be one struct, which then keeps what it has.
template <class Struct>
Status read_struct(const Argument& name, const Struct* given, Struct* known) {
  constexpr size_t kLargest = 1 << 16;  // no version will be larger; a garbage size must not be followed
  if (given == nullptr) return fail(twInvalidArgument, "{} is NULL", name);
  size_t size = 0;
  std::memcpy(&size, given, sizeof size);
  if (size < sizeof(size_t) || size > kLargest) {
    return fail(twInvalidArgument, "{}->size is {}; it must be sizeof(*{}), {} in this version", name, Value(size),
                name, sizeof(Struct));
  }
  const auto* const bytes = reinterpret_cast<const unsigned char*>(given);
  for (size_t i = sizeof(Struct); i < size; ++i) {
    if (bytes[i] != 0) {
      return fail(twInvalidArgument, "{}->size is {}, from a newer version than this ({}), and its byte {} is not zero",
                  name, Value(size), sizeof(Struct), i);
    }
  }
  std::memmove(static_cast<void*>(known), given, size < sizeof(Struct) ? size : sizeof(Struct));
  known->size = sizeof(Struct);
  return {};
}

// Writes as much of a result struct as the caller's version has.
template <class Struct>
Status write_struct(const Argument& name, const Struct& known, Struct* given) {
  Struct checked{};
  TW_RETURN_IF_FAILED(read_struct(name, given, &checked));
  const size_t size = given->size;
  std::memcpy(static_cast<void*>(given), &known, size < sizeof(Struct) ? size : sizeof(Struct));
  given->size = size;
  return {};
}

// A group's config, with the placement and the configs that it points to, which have sizes of their own.
struct ReadConfig {
  twGroupConfig_t config = TW_GROUP_CONFIG_INIT;
  twPlacement_t placement = TW_PLACEMENT_INIT;
  std::list<ReadConfig> others;  // room_for
  std::vector<const twGroupConfig_t*> room_for;
};
// Reads a config. It then points into `known`.
Status read_config(const twGroupConfig_t* given, ReadConfig* known);

Status check_ranks(int32_t nranks);
// Checks a call's own sm_limit, which may be what config.sm_limit may be.
Status check_sm_limit(int32_t limit);
// Checks that a layout is one of high throughput (`exact`) or of low latency. `why`: what decides that, for the
// sentence.
Status check_layout(const Argument& name, twLayout_t id, bool exact, const char* why = nullptr);
// Checks that it is one of the group's mode.
Status check_layout(const Argument& name, twLayout_t id, const twGroup& group);
Status check_layer(const twGroup& group, int32_t layer);
// Checks a map that is to become a layer's, [P], and its shares, [P] or NULL. In placement.cc.
Status check_next_map(const PlacementSpec& spec, const int32_t* slot_expert, const float* slot_shares);

// Where [token, k] lies, in elements. The stride of a dimension of one element may be anything.
inline int64_t place_of(const twTensor_t& tensor, int64_t token, int64_t k) {
  return (token > 0 ? token * tensor.stride[0] : 0) + (k > 0 ? k * tensor.stride[1] : 0);
}

// Reads an id of a checked tensor of them.
inline int64_t id_at(const twTensor_t& ids, int64_t token, int64_t k) {
  const int64_t at = place_of(ids, token, k);
  return ids.dtype == twInt64 ? static_cast<const int64_t*>(ids.data)[at] : static_cast<const int32_t*>(ids.data)[at];
}

struct CheckedRouting {
  const twTensor_t* ids;
  const twTensor_t* weights;  // NULL: all 1
  int32_t tokens;
  Status too_many;  // why no dispatch of this group can take it: there are more tokens than max_tokens
};

// Checks a routing, values included; nothing is written. More tokens than the group takes are no failure here, where
// peers could not be told: they wait for a step, and routing is none. See twHandle::too_many.
// `handle`: the one that is routed again, which may have room for fewer than the group takes now; NULL: a new one.
Status check_routing(const twGroup& group, const twHandle* handle, const twTensor_t* ids, const twTensor_t* weights,
                     CheckedRouting* routing);

// What of a checked routing this rank sends: with token replicas its share, else all. Points into `all`'s tensors'
// memory.
struct RoutingShare {
  twTensor_t ids;
  twTensor_t weights;
  int32_t begin;
  int32_t tokens;

  RoutingShare(const twGroup& group, const CheckedRouting& all);
  CheckedRouting checked() const { return {&ids, weights.data != nullptr ? &weights : nullptr, tokens, {}}; }
};
// The sum of choice_digest (exchange/token_replicas.h) of a checked routing in the host's memory.
uint32_t choices_digest(const Shape& shape, const CheckedRouting& all);

// Fails for a handle that was made before the group grew: its arrays are too small for what may come now.
Status check_size(const twGroup& group, const twHandle& handle);
// Copies a checked routing into the handle's arrays.
void copy_routing(const Shape& shape, const CheckedRouting& checked, Routing* routing);
// Tells where a device will find a checked routing.
RoutingSource source_of(const CheckedRouting& checked);

// Whether a dispatch is one of high throughput. In a group of both modes the layout says so; beside one that there is
// not, which is refused, the bound says what peers do.
bool is_exact(const twGroup& group, twLayout_t layout, int32_t bound);

// What the rows of a call consist of (row_types.cc). *rows are the group's own before a check, and stay so after an
// error or where the call names none. `exact`: as is_exact tells of the call's dispatch.
DispatchRows own_rows(const twGroup& group, bool exact);
CombineRows own_combine_rows(const twGroup& group, bool exact);
Status check_dispatch_rows(const twGroup& group, const twDispatchInput_t& input, DispatchRows* rows);
Status check_combine_rows(const twGroup& group, const twCombineInput_t& input, CombineRows* rows);

// These check the structs of a call and make it a call of core/backend.h. fill_views fills in the output's views.
Status check_dispatch(twGroup& group, twHandle& handle, const twDispatchInput_t& input,
                      const twDispatchOutput_t& output, DispatchCall* call);
Status check_combine(twGroup& group, twHandle& handle, const twCombineInput_t& input, const twCombineOutput_t& output,
                     CombineCall* call);

// Checks what an exchange of counts names; gives the call, and the leases that its receive offsets lie in. In
// counts.cc.
Status check_counts(twGroup& group, const twHandle& handle, const twCountsInput_t& input, CountsCall* call,
                    std::vector<std::byte*>* leases);
// Checks the receive offsets of an exchange of counts whose room is known; gives them, and their leases. In leases.cc.
Status check_receive_offsets(twGroup& group, const twCountsInput_t& input, CountsCall* call,
                             std::vector<std::byte*>* leases);

// Checks what the caller gives for index lists, in a layout that has been checked; gives targets->lists. bound: of the
// call. fill_index_lists completes the caller's tensors of them. In index_lists.cc.
Status check_index_lists(const twGroup& group, const twDispatchOutput_t& output, int32_t bound,
                         DispatchTargets* targets, Extents* written);
void fill_index_lists(const DispatchCall& call, twDispatchOutput_t* output);

// Completes the caller's output tensors: shapes, and views where no memory was given.
void fill_views(twGroup& group, const twHandle& handle, const DispatchCall& call, twDispatchOutput_t* output);

}  // namespace tw::api
