// twGroupRoutingLayout: checks ids and outputs, and finds the layout on the host, or has a device find it. Nothing is
// sent, so a refusal concerns this rank alone. On the host the routing is made as `route` in tokenway.cc makes a
// handle's, by the same functions: a layout that another way finds might be another one.
#include "exchange/routing_layout.h"

#include "api/check.h"
#include "api/enter.h"
#include "api/registry.h"
#include "api/rows.h"

namespace tw::api {
namespace {

Status check_layout_outputs(const twGroup& group, const CheckedRouting& checked, const twRoutingLayout_t& wanted,
                            RoutingLayout* layout) {
  const Shape& shape = group.shape();
  const struct {
    RowsWanted rows;
    const twTensor_t& tensor;
    void* found;
  } outputs[] = {
      {{"layout.tokens_per_rank", twInt32, {shape.ranks}, 1, true, true, true},
       wanted.tokens_per_rank,
       &layout->tokens_per_rank},
      {{"layout.tokens_per_expert", twInt32, {shape.experts}, 1, true, true, true},
       wanted.tokens_per_expert,
       &layout->tokens_per_expert},
      {{"layout.token_in_rank", twBool, {checked.tokens}, shape.ranks, true},
       wanted.token_in_rank,
       &layout->token_in_rank},
      {{"layout.physical_ids", twInt32, {checked.tokens}, shape.top_k, true},
       wanted.physical_ids,
       &layout->physical_ids},
  };
  Extents written;
  for (const auto& [rows, tensor, found] : outputs) {
    if (tensor.data == nullptr) continue;
    int64_t strides[2];
    TW_RETURN_IF_FAILED(check_rows(rows, tensor, strides));
    std::memcpy(found, &tensor.data, sizeof tensor.data);
    written.add_contiguous(rows.name, tensor);
  }
  Extents read;
  const RoutingSource source = source_of(checked);
  read.add("ids",
           extent_of_pairs(source.ids, checked.tokens, shape.top_k, source.id_stride, dtype_bytes(source.id_dtype)));
  return check_apart(written, read);
}

// Finds the layout where the host can read the ids.
void find_here(const twGroup& group, const CheckedRouting& checked, int32_t layer, const RoutingLayout& layout) {
  const Shape& shape = group.shape();
  const auto choices = static_cast<size_t>(checked.tokens) * static_cast<size_t>(shape.top_k);
  std::vector<int32_t> ids(choices);
  std::vector<float> weights(choices);
  std::vector<int64_t> first(static_cast<size_t>(checked.tokens) + 1);
  std::vector<Destination> destinations(choices);
  std::vector<int32_t> send_counts(static_cast<size_t>(shape.ranks));
  Routing routing{checked.tokens, ids.data(), weights.data(), first.data(), destinations.data(), send_counts.data()};
  copy_routing(shape, checked, &routing);
  if (!group.maps.empty()) {
    choose_slots(shape, group.context.placement, group.maps[layer], group.config.placement.policy, &routing);
  }
  assign_slots(shape, group.context.placement, &routing);
  fill_layout(shape, routing, layout);
}

}  // namespace
}  // namespace tw::api

twResult_t twGroupRoutingLayout(twGroup_t group, int32_t layer, const twTensor_t* ids, const twRoutingLayout_t* given,
                                void* stream) {
  return tw::api::enter_group("twGroupRoutingLayout", group, [&]() -> tw::Status {
    TW_RETURN_IF_FAILED(group->backend->check_stream(stream));
    TW_RETURN_IF_FAILED(tw::api::check_layer(*group, layer));
    if (const int32_t replicas = group->context.replicas.size; replicas > 1) {
      return tw::fail(twUnsupported, "{} is {}; {} tells where one rank's tokens go, and each of these sends a share",
                      tw::Argument("config.token_replicas"), tw::Value(replicas), tw::Function{"twGroupRoutingLayout"});
    }
    if (group->moving != nullptr) {
      return tw::fail(twUnsupported, "{} is 1; a routing gets its map in its first step, which {} does not make",
                      tw::Argument("config.placement->moves"), tw::Function{"twGroupRoutingLayout"});
    }
    tw::api::CheckedRouting checked;
    TW_RETURN_IF_FAILED(tw::api::check_routing(*group, nullptr, ids, nullptr, &checked));
    TW_RETURN_IF_FAILED(checked.too_many);
    twRoutingLayout_t wanted = TW_ROUTING_LAYOUT_INIT;
    TW_RETURN_IF_FAILED(tw::api::read_struct("layout", given, &wanted));
    tw::LayoutCall call;
    TW_RETURN_IF_FAILED(tw::api::check_layout_outputs(*group, checked, wanted, &call.layout));
    if (!group->backend->on_device()) {
      tw::api::find_here(*group, checked, layer, call.layout);
      return {};
    }
    call.layer = layer;
    call.tokens = checked.tokens;
    call.source = tw::api::source_of(checked);
    call.stream = stream;
    if (group->config.placement.given && group->config.placement.policy == twReplicaBalanced &&
        call.layout.physical_ids == nullptr && call.tokens > 0) {
      return tw::fail(twInvalidArgument,
                      "{} has data NULL; on a device a group of policy {} needs it: choices are kept there until all "
                      "are known",
                      tw::Argument("layout.physical_ids"), TW_CONSTANT(twReplicaBalanced));
    }
    return group->backend->find_layout(call);
  });
}
