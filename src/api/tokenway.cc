// The entry points of tokenway.h: they check arguments, find objects and turn errors into results; src/core does the
// rest. No exception leaves. Bad arguments of a step must not return alone: the step is refused, so that no peer waits
// (refuse_dispatch, refuse_counts, refuse_combine), except where all ranks fail alike, or nothing can be sent.
#include <pthread.h>

#include <algorithm>
#include <numeric>

#include "api/check.h"
#include "api/enter.h"
#include "api/registry.h"

namespace {

using tw::Argument;
using tw::fail;
using tw::Function;
using tw::Status;
using tw::Value;
using tw::api::comms;
using tw::api::enter;
using tw::api::enter_group;
using tw::api::enter_handle;
using tw::api::groups;
using tw::api::handles;
using tw::api::visit;

thread_local std::string environment_value;
// A forked child shares the sockets of its parent and must not speak on them: the parent's objects do not exist there.
const int at_fork = pthread_atfork([] { comms.lock(), groups.lock(), handles.lock(); },
                                   [] { handles.unlock(), groups.unlock(), comms.unlock(); },
                                   [] {
                                     comms.clear(), groups.clear(), handles.clear();
                                     handles.unlock(), groups.unlock(), comms.unlock();
                                   });

Status check_handle(twGroup_t group, twHandle_t handle) {
  return handles.find("handle", handle, [&] {
    return handle->group == group
               ? Status{}
               : fail(twInvalidArgument, "{} {} belongs to another group", Argument("handle"), handle);
  });
}

Status check_exact(const twGroup& group) {
  if (group.shape().exact()) return {};
  return fail(twInvalidUsage, "{} is {}, which has no exchange of counts", Argument("config.mode"),
              TW_CONSTANT(twLowLatency));
}

void route(const twGroup& group, const tw::api::CheckedRouting& all, twHandle* handle) {
  const tw::api::RoutingShare share(group, all);
  const tw::api::CheckedRouting checked = share.checked();
  handle->too_many = all.too_many;
  handle->all.tokens = all.tokens;
  handle->all.begin = share.begin;
  const bool shares = group.context.replicas.size > 1;
  handle->dispatched = false;
  handle->counts.exchanged = false;
  handle->counted = {};
  handle->sizing.reset();
  const tw::ExpertMap* const map = group.maps.empty() ? nullptr : &group.maps[handle->map.layer];
  handle->map.digest = map == nullptr ? 0 : map->digest();
  handle->map.bound = false;
  if (group.backend->on_device()) {  // its first dispatch copies and assigns
    handle->routing.tokens = checked.tokens;
    handle->source = tw::api::source_of(checked);
    if (shares) handle->all.source = tw::api::source_of(all);
    return;
  }
  if (shares) handle->all.sum = tw::api::choices_digest(group.shape(), all);
  tw::api::copy_routing(group.shape(), checked, &handle->routing);
  if (group.shape().counts_loads != 0) tw::count_choices(group.shape(), handle->routing, handle->map.choices);
  if (group.moving != nullptr) return;  // its first step says by which map
  if (map != nullptr) {
    tw::choose_slots(group.shape(), group.context.placement, *map, group.config.placement.policy, &handle->routing);
  }
  tw::assign_slots(group.shape(), group.context.placement, &handle->routing);
}

}  // namespace

int twVersion(void) { return TW_VERSION; }

twResult_t twSetInterrupt(int (*asked)(void* context), void* context, int64_t thread) {
  return enter([&]() -> Status {
    if (thread < 0) {
      return fail(twInvalidArgument, "{} is {}; it must be the id of a thread (gettid), or 0 for every one",
                  Argument("thread"), Value(thread));
    }
    tw::set_interrupt(asked, context, thread);
    return {};
  });
}

twResult_t twEnvironment(int32_t index, const char** name, const char** value, const char** doc) {
  return enter([&]() -> Status {
    TW_CHECK_NOT_NULL(name);
    TW_CHECK_NOT_NULL(value);
    TW_CHECK_NOT_NULL(doc);
    if (!tw::describe_variable(index, name, &environment_value, doc)) {
      return fail(twInvalidArgument, "{} is {}, past the last variable", Argument("index"), Value(index));
    }
    *value = environment_value.c_str();
    return {};
  });
}

twResult_t twGroupWindowBytes(const twGroupConfig_t* given, int32_t nranks, twWindowBytes_t* bytes) {
  return enter([&]() -> Status {
    TW_RETURN_IF_FAILED(tw::api::check_ranks(nranks));
    tw::api::ReadConfig known;
    TW_RETURN_IF_FAILED(tw::api::read_config(given, &known));
    tw::Environment environment;
    TW_RETURN_IF_FAILED(tw::read_environment(&environment));
    tw::GroupConfig config;
    TW_RETURN_IF_FAILED(tw::check_config(known.config, nranks, false, environment, &config));
    return tw::api::write_struct("bytes", tw::window_bytes(config), bytes);
  });
}

twResult_t twGroupInfo(twGroup_t group, twGroupInfo_t* info) {
  return visit(groups, "group", group, [&]() -> Status {
    const std::shared_lock sizes(group->sizes);
    twGroupInfo_t known{};
    known.rank = group->me();
    known.nranks = group->ranks();
    known.num_local_experts = group->context.local_experts;
    known.lanes = group->config.given.lanes;
    known.timeout_ms = group->config.given.timeout_ms;
    known.window_bytes = group->config.arena == 0 ? group->config.map.bytes() : 0;
    known.max_tokens = group->shape().max_tokens;
    known.max_recv_tokens = group->shape().recv_rows;
    known.dispatch_room = group->shape().most_dispatch_bytes();
    known.combine_room = group->shape().most_combine_bytes();
    known.inbox_tokens = group->shape().exact() ? group->shape().part_tokens() : 0;
    known.low_latency_tokens = group->shape().low_latency_tokens;
    const tw::DeviceLinks links = group->backend->links();
    known.packet_tokens = links.packet_tokens;
    known.links = links.known;
    known.handles = links.handles;
    known.refusal = links.refusal;
    known.token_replicas = group->context.replicas.size;
    known.domain = group->config.given.domain;
    std::copy(group->members.begin(), group->members.end(), known.comm_ranks);
    return tw::api::write_struct("info", known, info);
  });
}

twResult_t twGroupLayout(twGroup_t group, twLayout_t id, twLayoutInfo_t* info) {
  return visit(groups, "group", group, [&]() -> Status {
    const std::shared_lock sizes(group->sizes);
    TW_RETURN_IF_FAILED(tw::api::check_layout("layout", id, *group));
    const tw::Layout& layout = tw::layout_of(id);
    twLayoutInfo_t known{};
    known.exact = layout.exact ? 1 : 0;
    known.by_expert = layout.by_expert ? 1 : 0;
    known.views = layout.views() ? 1 : 0;
    known.blocks = layout.blocks(group->ranks(), group->context.local_experts);
    known.packed = layout.packed ? 1 : 0;
    known.rows_per_bound = layout.rows_per_bound(group->ranks(), group->shape().top_k, group->context.local_experts);
    known.row_alignment = layout.has_offsets() ? group->config.given.row_alignment : 1;
    known.ids_per_row = layout.ids_per_row(group->shape().top_k);
    known.offsets = layout.has_offsets() ? known.blocks + 1 : 0;
    const tw::DispatchRows rows = tw::api::own_rows(*group, layout.exact);
    known.default_bound = layout.exact ? 0 : rows.map.shape().default_bound();
    return tw::api::write_struct("info", known, info);
  });
}

twResult_t twGroupCheckRows(twGroup_t group, const twDispatchInput_t* dispatched, const twCombineInput_t* combined) {
  return visit(groups, "group", group, [&]() -> Status {
    const std::shared_lock sizes(group->sizes);
    twDispatchInput_t input{};
    twCombineInput_t sums{};
    TW_RETURN_IF_FAILED(tw::api::read_struct("dispatched", dispatched, &input));
    TW_RETURN_IF_FAILED(tw::api::read_struct("combined", combined, &sums));
    tw::DispatchRows rows = tw::api::own_rows(*group, true);
    TW_RETURN_IF_FAILED(tw::api::check_dispatch_rows(*group, input, &rows));
    tw::CombineRows of_sums = tw::api::own_combine_rows(*group, true);
    return tw::api::check_combine_rows(*group, sums, &of_sums);
  });
}

twResult_t twGroupPortableInfo(twGroup_t group, twPortableInfo_t* info) {
  return visit(groups, "group", group, [&]() -> Status {
    const std::shared_lock sizes(group->sizes);
    twPortableInfo_t known{};
    if (!group->backend->describe(&known)) return fail(twUnsupported, "the group's ranks share memory");
    return tw::api::write_struct("info", known, info);
  });
}

twResult_t twHandleMemBytes(twGroup_t group, size_t* bytes) {
  return visit(groups, "group", group, [&]() -> Status {
    const std::shared_lock sizes(group->sizes);
    TW_CHECK_NOT_NULL(bytes);
    *bytes = group->handle_bytes;
    return {};
  });
}

twResult_t twHandleCreate(twHandle_t* handle, twGroup_t group, const twTensor_t* ids, const twTensor_t* weights,
                          void* memory) {
  return twHandleCreateForLayer(handle, group, 0, ids, weights, memory);
}

twResult_t twHandleCreateForLayer(twHandle_t* handle, twGroup_t group, int32_t layer, const twTensor_t* ids,
                                  const twTensor_t* weights, void* memory) {
  return enter_group("twHandleCreateForLayer", group, [&]() -> Status {
    TW_CHECK_NOT_NULL(handle);
    TW_RETURN_IF_FAILED(tw::api::check_layer(*group, layer));
    if (reinterpret_cast<uintptr_t>(memory) % 64 != 0) {
      return fail(twInvalidArgument, "{} is {}; it must be aligned to 64 bytes", Argument("memory"), memory);
    }
    tw::api::CheckedRouting checked;
    TW_RETURN_IF_FAILED(tw::api::check_routing(*group, nullptr, ids, weights, &checked));
    auto made = std::make_unique<twHandle>();
    made->group = group;
    made->max_tokens = group->shape().max_tokens;
    made->most_rows = group->shape().most_rows();
    made->exact = group->shape().exact();
    made->map.layer = layer;
    made->owns_block = memory == nullptr;
    made->block = memory == nullptr ? group->take_block() : static_cast<std::byte*>(memory);
    if (made->block == nullptr) {
      return fail(twOutOfMemory, "no memory for a handle of {}", tw::bytes_text(group->handle_bytes));
    }
    group->place_arrays(made->block, made.get());
    route(*group, checked, made.get());
    group->handles.insert(made.get());
    handles.add(made.get());
    *handle = made.release();
    return {};
  });
}

twResult_t twHandleUpdate(twHandle_t handle, const twTensor_t* ids, const twTensor_t* weights) {
  return enter_handle("twHandleUpdate", handle, [&]() -> Status {
    if (handle->pending != tw::Pending::kNone || handle->channel >= 0) {
      return fail(twInvalidUsage, "{} holds lane {}; combine or release it before {}", Argument("handle"),
                  handle->channel, Function{"twHandleUpdate"});
    }
    if (handle->sized_in_graph) {
      return fail(
          twInvalidUsage,
          "a captured dispatch or combine of this handle has tensors of as many rows as its counts told, and a replay "
          "after {} might go beyond them; update a handle whose counts are exchanged in the graph, or create one",
          Function{"twHandleUpdate"});
    }
    tw::api::CheckedRouting checked;
    TW_RETURN_IF_FAILED(tw::api::check_routing(*handle->group, handle, ids, weights, &checked));
    tw::part_leases(*handle->group, *handle);
    route(*handle->group, checked, handle);
    return {};
  });
}

twResult_t twHandleRelease(twHandle_t handle) {
  return enter_handle("twHandleRelease", handle,
                      [&]() -> Status { return tw::release_channel(*handle->group, *handle); });
}

twResult_t twHandleDestroy(twHandle_t handle) {
  return enter_handle("twHandleDestroy", handle, [&]() -> Status {
    twGroup& group = *handle->group;
    if (group.is_sticky()) handle->pending = tw::Pending::kNone;  // nobody will finish it
    TW_RETURN_IF_FAILED(tw::release_channel(group, *handle));
    tw::part_leases(group, *handle);
    handles.remove(handle);
    group.backend->forget(*handle);
    group.handles.erase(handle);
    if (handle->owns_block) group.give_block(*handle);
    delete handle;
    return {};
  });
}

twResult_t twHandleNumRecvTokens(twHandle_t handle, int32_t* counts, int32_t* total) {
  return enter_handle("twHandleNumRecvTokens", handle, [&]() -> Status {
    twGroup& group = *handle->group;
    // Rows of the last dispatch, if that was one of low latency: it drops none.
    const bool counted = handle->counts.exchanged && !(handle->dispatched && !handle->exact);
    if (!handle->dispatched && !counted) {
      return fail(twInvalidUsage, "the handle has not been {} since it was routed",
                  group.shape().exact() ? "counted" : "dispatched");
    }
    std::vector<int32_t> received(group.ranks());
    if (counted) {
      TW_RETURN_IF_FAILED(tw::learn_counts(*handle->group, *handle));
      received = handle->counted.received;
    } else {
      TW_RETURN_IF_FAILED(tw::heed_interrupt(group, group.backend->copy_counts(*handle, received.data())));
    }
    if (counts != nullptr) std::copy(received.begin(), received.end(), counts);
    if (total != nullptr) *total = std::accumulate(received.begin(), received.end(), 0);
    return {};
  });
}

namespace {

Status check_counts_known(twHandle_t handle) {
  if (handle->counts.exchanged) return {};
  return fail(twInvalidUsage, "the handle's counts have not been exchanged since it was routed");
}

// Checks the arguments of calls that ask for the rows of a layout.
Status check_counted(twHandle_t handle, twLayout_t layout, const int64_t* rows) {
  TW_CHECK_NOT_NULL(rows);
  TW_RETURN_IF_FAILED(tw::api::check_layout("layout", layout, true));
  return check_counts_known(handle);
}

}  // namespace

twResult_t twHandleNumRecvRows(twHandle_t handle, twLayout_t layout, int64_t* rows) {
  return enter_handle("twHandleNumRecvRows", handle, [&]() -> Status {
    TW_RETURN_IF_FAILED(check_counted(handle, layout, rows));
    TW_RETURN_IF_FAILED(tw::learn_counts(*handle->group, *handle));
    *rows = tw::shown_rows(*handle->group, *handle, tw::layout_of(layout), true);
    return {};
  });
}

twResult_t twHandleNumExpertRows(twHandle_t handle, int32_t* rows) {
  return enter_handle("twHandleNumExpertRows", handle, [&]() -> Status {
    TW_CHECK_NOT_NULL(rows);
    TW_RETURN_IF_FAILED(check_counts_known(handle));
    TW_RETURN_IF_FAILED(tw::learn_counts(*handle->group, *handle));
    std::copy(handle->counted.expert_rows.begin(), handle->counted.expert_rows.end(), rows);
    return {};
  });
}

twResult_t twHandleNumOutputRows(twHandle_t handle, twLayout_t layout, int64_t* rows) {
  return enter_handle("twHandleNumOutputRows", handle, [&]() -> Status {
    TW_RETURN_IF_FAILED(check_counted(handle, layout, rows));
    *rows = tw::shown_rows(*handle->group, *handle, tw::layout_of(layout), handle->is_sized());
    return {};
  });
}

twResult_t twHandleCountsReady(twHandle_t handle, int32_t timeout_ms, int32_t* ready) {
  return enter_handle("twHandleCountsReady", handle, [&]() -> Status {
    TW_CHECK_NOT_NULL(ready);
    if (timeout_ms < -1) {
      return fail(twInvalidArgument, "{} is {}; it must be -1 (the group's timeout) or from 0 to {}",
                  Argument("timeout_ms"), Value(timeout_ms), INT32_MAX);
    }
    TW_RETURN_IF_FAILED(check_exact(*handle->group));
    bool known = false;
    TW_RETURN_IF_FAILED(tw::counts_ready(*handle->group, *handle, timeout_ms, &known));
    *ready = known ? 1 : 0;
    return {};
  });
}

twResult_t twExchangeCounts(twGroup_t group, twHandle_t handle, const twCountsInput_t* given) {
  return enter_group("twExchangeCounts", group, [&]() -> Status {
    TW_RETURN_IF_FAILED(tw::check_usable(*group, twPhaseCounts));
    TW_RETURN_IF_FAILED(check_exact(*group));
    twCountsInput_t input = TW_COUNTS_INPUT_INIT;
    Status status = tw::api::read_struct("input", given, &input);
    // Nothing can be sent on a stream that is no good, not even the refusal.
    if (status.ok() && group->backend->on_device()) TW_RETURN_IF_FAILED(group->backend->check_stream(input.stream));
    if (status.ok()) status = group->backend->check_stream(input.stream);
    Status found = check_handle(group, handle);
    twHandle* const known = found.ok() ? handle : nullptr;
    if (status.ok()) status = std::move(found);
    tw::CountsCall call;
    std::vector<std::byte*> leases;
    if (status.ok()) status = tw::api::check_counts(*group, *handle, input, &call, &leases);
    if (status.ok() && handle->counts.exchanged && handle->channel >= 0) {  // all ranks see it alike: nobody waits
      return fail(twInvalidUsage, "{} holds lane {}; combine or release it before {}", Argument("handle"),
                  handle->channel, Function{"twExchangeCounts"});
    }
    // Peers are told at once, as for a dispatch.
    if (!status.ok()) {
      return tw::refuse_counts(*group, known, input.lane, input.send_only == 1, input.stream, std::move(status));
    }
    return tw::exchange_counts(*group, *handle, call, input.lane, std::move(leases));
  });
}

twResult_t twDispatch(twGroup_t group, twHandle_t handle, const twDispatchInput_t* given, twDispatchOutput_t* output) {
  return enter_group("twDispatch", group, [&]() -> Status {
    TW_RETURN_IF_FAILED(tw::check_usable(*group, twPhaseDispatch));
    twDispatchInput_t input{};
    input.lane = -1;
    twDispatchOutput_t out{};
    out.layout = static_cast<twLayout_t>(-1);  // not known
    tw::DispatchCall call;
    Status status = tw::api::read_struct("input", given, &input);  // first: it names the channel that peers wait on
    // Nothing can be sent on a stream that is no good, not even the refusal.
    if (status.ok() && group->backend->on_device()) TW_RETURN_IF_FAILED(group->backend->check_stream(input.stream));
    Status found = check_handle(group, handle);
    twHandle* const known = found.ok() ? handle : nullptr;
    if (status.ok()) status = std::move(found);
    Status wanted = tw::api::read_struct("output", output, &out);
    if (status.ok()) status = std::move(wanted);
    call.rows = tw::api::own_rows(*group, tw::api::is_exact(*group, out.layout, input.bound));
    if (status.ok()) status = tw::api::check_dispatch(*group, *handle, input, out, &call);
    if (!status.ok()) {
      const int32_t tokens = known == nullptr ? 0 : known->routing.tokens;
      const tw::Shape& shape = call.rows.map.shape();
      const int32_t bound = input.bound == 0 ? tw::default_bound(shape, known) : input.bound;
      const bool bounded = bound >= std::min(tokens, shape.max_tokens) && bound <= shape.max_tokens;
      return tw::refuse_dispatch(*group, known, input.lane, input.send_only == 1, bounded ? bound : -1, call.rows.map,
                                 input.stream, std::move(status));
    }
    status = tw::dispatch(*group, *handle, &call, input.lane, input.send_only != 0);
    if (call.at.channel >= 0) {  // after an error too: what the caller then looks at is safe
      tw::api::fill_views(*group, *handle, call, &out);
      TW_RETURN_IF_FAILED(tw::api::write_struct("output", out, output));
    }
    return status;
  });
}

twResult_t twCombine(twGroup_t group, twHandle_t handle, const twCombineInput_t* given,
                     const twCombineOutput_t* output) {
  return enter_group("twCombine", group, [&]() -> Status {
    TW_RETURN_IF_FAILED(tw::check_usable(*group, twPhaseCombine));
    TW_RETURN_IF_FAILED(check_handle(group, handle));
    twCombineInput_t input{};
    Status status = tw::api::read_struct("input", given, &input);
    tw::CombineCall call;
    call.sent = tw::api::own_combine_rows(*group, handle->exact);
    if (!handle->dispatched) {
      if (status.ok()) (void)tw::api::check_combine_rows(*group, input, &call.sent);
      const bool refused = handle->refused;
      if (status.ok()) tw::keep_pace(*group, *handle, call.sent, input.stream);
      if (refused && status.ok()) {
        return fail(twInvalidUsage,
                    "the handle's dispatch was refused on this rank, so there is nothing to combine; the handle has "
                    "given its lane back, as those of peers do by their combine");
      }
      if (handle->pending != tw::Pending::kDispatch) {
        return fail(twInvalidUsage, "combine before dispatch: the handle has not been dispatched");
      }
      return fail(twInvalidUsage, "the handle's dispatch is pending; call {} before {}", Function{"twComplete"},
                  Function{"twCombine"});
    }
    twCombineOutput_t out{};
    if (status.ok() && group->backend->on_device()) TW_RETURN_IF_FAILED(group->backend->check_stream(input.stream));
    if (status.ok()) status = tw::api::read_struct("output", output, &out);
    if (status.ok()) status = tw::api::check_combine(*group, *handle, input, out, &call);
    if (!status.ok()) return tw::refuse_combine(*group, *handle, call.sent, input.stream, std::move(status));
    return tw::combine(*group, *handle, call, input.send_only != 0);
  });
}

twResult_t twComplete(twGroup_t group, twHandle_t handle, void* stream) {
  return enter_group("twComplete", group, [&]() -> Status {
    TW_RETURN_IF_FAILED(check_handle(group, handle));
    TW_RETURN_IF_FAILED(group->backend->check_stream(stream));
    return tw::complete(*group, *handle, stream);
  });
}
