// Checks what callers give for routings, dispatches and combines (api/check.h): ids, layouts, tensors, overlap,
// windows. It gives a CheckedRouting, DispatchCall or CombineCall, and fills in outputs. What passes is taken as right
// behind it, so a check that is missing becomes a stray read or write; the sentences name the argument, its value and
// the allowed range. keep_own decides whether own partials go through the window: it must not let a peer overwrite them
// (S3).
#include "api/check.h"

#include <algorithm>
#include <initializer_list>

#include "api/places.h"

namespace tw::api {
namespace {

Status check_routing_tensor(const Argument& name, const twTensor_t& tensor, int32_t top_k) {
  if (tensor.ndim != 2 || tensor.shape[1] != top_k || tensor.shape[0] < 0) {
    return fail(twInvalidArgument, "{} has shape {}; it must be [T, {}]", name, shape_text(tensor), top_k);
  }
  if (tensor.shape[0] > 0 && tensor.data == nullptr) return fail(twInvalidArgument, "{} has data NULL", name);
  for (const int dimension : {0, 1}) TW_RETURN_IF_FAILED(check_stride(name, tensor, dimension));
  const auto alignment = static_cast<uintptr_t>(dtype_bytes(tensor.dtype));
  if (reinterpret_cast<uintptr_t>(tensor.data) % alignment != 0) {
    return fail(twInvalidArgument, "{} has data {}; it must be aligned to {} bytes", name, tensor.data, alignment);
  }
  return {};
}

Status check_id_values(const Shape& shape, const twTensor_t& ids) {
  int32_t seen[TW_MAX_TOP_K];
  for (int64_t token = 0; token < ids.shape[0]; ++token) {
    int count = 0;
    for (int32_t k = 0; k < shape.top_k; ++k) {
      const int64_t id = id_at(ids, token, k);
      if (id == -1) continue;
      if (id < 0 || id >= shape.choices()) {
        return fail(twInvalidArgument, "{} is {}; it must be -1 (no expert) or from 0 to {}",
                    Argument("ids[]", token, k), Value(id), shape.choices() - 1);
      }
      if (std::find(seen, seen + count, static_cast<int32_t>(id)) != seen + count) {
        return fail(twInvalidArgument, "{} is {}, which the token has already; an id stands at most once",
                    Argument("ids[]", token, k), Value(id));
      }
      seen[count++] = static_cast<int32_t>(id);
    }
  }
  return {};
}

// The shape of a payload by column: [elements, M], in expert_major for each expert.
std::vector<int64_t> columns_shape(const twPayload_t& payload, const Columns& columns, const Lead& lead) {
  if (lead.packed) return {payload.elements, columns.rows};
  return {lead.blocks, payload.elements, columns.rows};
}

// Checks which payloads are wanted column-major.
Status check_columns(const DispatchRows& types, const twDispatchOutput_t& output, const Layout& layout, int64_t rows,
                     Columns columns[]) {
  for (int q = 0; q < TW_MAX_PAYLOADS; ++q) {
    const int32_t wanted = output.column_major[q];
    if (wanted == 0) continue;
    TW_RETURN_IF_FAILED(check_switch({"output.column_major[]", q}, wanted));
    if (!layout.by_expert || q >= types.payloads) {
      return fail(twInvalidArgument, "{} is {}; only payloads of {} and {}, from 0 to {}, have columns",
                  Argument("output.column_major[]", q), Value(wanted), TW_CONSTANT(twExpertMajor),
                  TW_CONSTANT(twGrouped), types.payloads - 1);
    }
    const int32_t elements = layout.packed ? 0 : static_cast<int32_t>(types.types[q].elements);
    columns[q] = Columns::of(rows, dtype_bytes(types.types[q].dtype), elements);
  }
  return {};
}

// Checks the outputs that layouts by expert alone have.
Status check_expert_targets(const twGroup& group, const twDispatchOutput_t& output, const Layout& layout,
                            const Lead& lead, DispatchTargets* targets) {
  int64_t strides[2];
  if (output.offsets.data != nullptr && !layout.has_offsets()) {
    return fail(twInvalidArgument, "{} has data {}; only {} has it", Argument("output.offsets"), output.offsets.data,
                TW_CONSTANT(twGrouped));
  }
  for (const auto& [argument, data] : {std::pair(Argument("output.origins"), output.origins.data),
                                       {"output.source_counts", output.source_counts.data}}) {
    if (data == nullptr || layout.by_expert) continue;
    return fail(twInvalidArgument, "{} has data {}; only {} and {} have it", argument, data, TW_CONSTANT(twExpertMajor),
                TW_CONSTANT(twGrouped));
  }
  if (output.offsets.data != nullptr) {
    const int64_t offsets = group.context.local_experts + 1;
    TW_RETURN_IF_FAILED(check_rows({"output.offsets", twInt32, {offsets}, 1, true}, output.offsets, strides));
    targets->offsets = static_cast<int32_t*>(output.offsets.data);
  }
  if (output.origins.data != nullptr) {
    TW_RETURN_IF_FAILED(
        check_rows({"output.origins", twInt64, lead.dimensions(), 1, true, true, true}, output.origins, strides));
    targets->origins = static_cast<int64_t*>(output.origins.data);
  }
  if (output.source_counts.data != nullptr) {
    const std::vector<int64_t> wanted{group.context.local_experts, group.ranks()};
    TW_RETURN_IF_FAILED(
        check_rows({"output.source_counts", twInt32, wanted, 1, true, true, true}, output.source_counts, strides));
    targets->source_counts = static_cast<int32_t*>(output.source_counts.data);
  }
  return {};
}

// Checks that 32 bits tell the rows of a layout apart, as offsets do.
Status check_packed(const Argument& name, twLayout_t layout, const Lead& lead) {
  if (!lead.packed || lead.rows <= INT32_MAX) return {};
  return fail(twInvalidArgument,
              "{} is {}; with this bound it has {} rows, more than {}, the most that 32 bits tell apart", name,
              Value(layout), lead.rows, INT32_MAX);
}

// Checks the optional outputs of a dispatch, for which the caller may have given memory.
Status check_targets(const twGroup& group, const twHandle& handle, const twDispatchOutput_t& output,
                     const DispatchRows& types, int32_t bound, DispatchTargets* targets, Extents* written) {
  const twGroupConfig_t& config = group.config.given;
  const Layout& layout = layout_of(output.layout);
  const Lead lead = lead_of(group, handle, layout, bound);
  TW_RETURN_IF_FAILED(check_packed("output.layout", output.layout, lead));
  int64_t strides[2];
  targets->layout = output.layout;
  targets->rows = lead.packed ? lead.rows : 0;
  targets->alignment = config.row_alignment;
  TW_RETURN_IF_FAILED(check_columns(types, output, layout, lead.rows, targets->columns));
  for (int q = 0; q < types.payloads; ++q) {
    if (output.payloads[q].data == nullptr) continue;
    const Argument name("output.payloads[]", q);
    const twPayload_t& payload = types.types[q];
    RowsWanted wanted{name, payload.dtype, lead.dimensions(), payload.elements, true, false};
    const Columns& columns = targets->columns[q];
    if (columns.wanted()) {
      wanted = {name, payload.dtype, columns_shape(payload, columns, lead), 1, true, false, true};
    }
    TW_RETURN_IF_FAILED(check_rows(wanted, output.payloads[q], strides));
    targets->payloads[q] = static_cast<std::byte*>(output.payloads[q].data);
    written->add_contiguous(name, output.payloads[q]);
  }
  const int64_t per_row = layout.ids_per_row(config.top_k);
  targets->ids = layout.by_expert ? nullptr : handle.shown.ids;
  targets->weights = layout.by_expert ? nullptr : handle.shown.weights;
  targets->counts = layout.by_expert ? handle.experts.counts : handle.shown.counts;
  targets->offsets = nullptr;
  if (layout.has_offsets()) targets->offsets = layout.exact ? handle.shown.offsets : handle.shown.slot_offsets;
  if (output.ids.data != nullptr) {
    TW_RETURN_IF_FAILED(
        check_rows({"output.ids", config.id_dtype, lead.dimensions(), per_row, true}, output.ids, strides));
    targets->ids = output.ids.data;
  }
  if (output.weights.data != nullptr) {
    TW_RETURN_IF_FAILED(
        check_rows({"output.weights", twFloat32, lead.dimensions(), per_row, true}, output.weights, strides));
    targets->weights = static_cast<float*>(output.weights.data);
  }
  if (output.counts.data != nullptr) {
    const int64_t blocks = layout.blocks(group.ranks(), group.context.local_experts);
    TW_RETURN_IF_FAILED(check_rows({"output.counts", twInt32, {blocks}, 1, true}, output.counts, strides));
    targets->counts = static_cast<int32_t*>(output.counts.data);
  }
  TW_RETURN_IF_FAILED(check_expert_targets(group, output, layout, lead, targets));
  for (const auto& [field, tensor] : {std::pair(Argument("output.ids"), &output.ids),
                                      {"output.weights", &output.weights},
                                      {"output.counts", &output.counts},
                                      {"output.offsets", &output.offsets},
                                      {"output.origins", &output.origins},
                                      {"output.source_counts", &output.source_counts}}) {
    if (tensor->data != nullptr) written->add_contiguous(field, *tensor);
  }
  return {};
}

// Adds what a kernel of a dispatch reads while it writes its outputs. A host has sent all of it before it writes any.
void add_read(const twGroup& group, const twHandle& handle, const DispatchCall& call, Extents* read) {
  const DispatchRows& types = call.rows;
  const twGroupConfig_t& config = group.config.given;
  const int64_t tokens = handle.routing.tokens;
  for (int q = 0; q < types.payloads; ++q) {
    const int64_t element = dtype_bytes(types.types[q].dtype);
    const int64_t stride = tokens > 1 ? call.payloads[q].stride : 0;
    const int64_t row = types.types[q].elements * element;
    read->add({"input.payloads[]", q}, extent_of(call.payloads[q].data, tokens, stride, row));
  }
  // Token replicas make a digest of all ids and weights.
  const bool shares = !group.context.replicas.is_one();
  const RoutingSource& source = shares ? handle.all.source : handle.source;
  const int64_t routed = handle.all.tokens;
  if (!source.unread) return;
  const int64_t top_k = config.top_k;
  read->add("the handle's ids",
            extent_of_pairs(source.ids, routed, top_k, source.id_stride, dtype_bytes(source.id_dtype)));
  if (source.weights == nullptr) return;
  read->add("the handle's weights",
            extent_of_pairs(source.weights, routed, top_k, source.weight_stride, sizeof(float)));
}

// Fails with the layouts that are allowed, in the table's order: those of low latency, of high throughput, or of both.
Status fail_layout(const Argument& name, twLayout_t id, const char* why, bool low_latency, bool exact) {
  std::vector<Sentence> allowed;
  for (const bool of_exact : {false, true}) {
    for (const Layout& each : kLayouts) {
      if (each.exact == of_exact && (of_exact ? exact : low_latency)) allowed.push_back(Constant{each.name, each.id});
    }
  }
  Sentence listed;
  for (size_t i = 0; i < allowed.size(); ++i) {
    if (i > 0) listed.append(Sentence(i + 1 == allowed.size() ? " or " : ", "));
    listed.append(allowed[i]);
  }
  return fail(twInvalidArgument, "{} is {}; {}it must be {}", name, Value(id), why, listed);
}

}  // namespace

Status check_layout(const Argument& name, twLayout_t id, bool exact, const char* why) {
  const Layout* const layout = find_layout(id);
  if (layout != nullptr && layout->exact == exact) return {};
  if (why == nullptr) why = exact ? "in high throughput " : "";
  return fail_layout(name, id, why, !exact, exact);
}

Status check_layout(const Argument& name, twLayout_t id, const twGroup& group) {
  if (!group.shape().has_both_modes()) return check_layout(name, id, group.shape().exact());
  if (find_layout(id) != nullptr) return {};
  return fail_layout(name, id, "", true, true);
}

Status read_config(const twGroupConfig_t* given, ReadConfig* known) {
  constexpr int32_t kMostRoomFor = 64;  // so that a garbage number is not followed
  TW_RETURN_IF_FAILED(read_struct("config", given, &known->config));
  twGroupConfig_t& config = known->config;
  if (config.placement != nullptr) {
    TW_RETURN_IF_FAILED(read_struct("config.placement", config.placement, &known->placement));
    config.placement = &known->placement;
  }
  TW_RETURN_IF_FAILED(check_range("config.num_room_for", config.num_room_for, 0, kMostRoomFor));
  if (config.num_room_for > 0 && config.room_for == nullptr) {
    return fail(twInvalidArgument, "{} is NULL", Argument("config.room_for"));
  }
  for (int32_t i = 0; i < config.num_room_for; ++i) {
    ReadConfig& other = known->others.emplace_back();
    TW_RETURN_IF_FAILED(read_struct({"config.room_for[]", i}, config.room_for[i], &other.config));
    other.config.num_room_for = 0;  // only its own room counts
    if (other.config.placement != nullptr) {
      TW_RETURN_IF_FAILED(read_struct({"config.room_for[]->placement", i}, other.config.placement, &other.placement));
      other.config.placement = &other.placement;
    }
    known->room_for.push_back(&other.config);
  }
  config.room_for = known->room_for.data();
  return {};
}

Status check_sm_limit(int32_t limit) { return check_range("input.sm_limit", limit, 0, INT32_MAX); }

Status check_ranks(int32_t nranks) { return check_range("nranks", nranks, 1, TW_MAX_RANKS); }

Status check_size(const twGroup& group, const twHandle& handle) {
  if (handle.max_tokens == group.shape().max_tokens && handle.most_rows == group.shape().most_rows()) return {};
  return fail(
      twInvalidUsage,
      "the handle was made when max_tokens was {}, and its arrays have no room for what may come since the group "
      "has grown; make a new one by {}",
      handle.max_tokens, Function{"twHandleCreateForLayer"});
}

Status check_routing(const twGroup& group, const twHandle* handle, const twTensor_t* ids, const twTensor_t* weights,
                     CheckedRouting* routing) {
  const Shape& shape = group.shape();
  if (ids == nullptr) return fail(twInvalidArgument, "{} is NULL", Argument("ids"));
  if (ids->dtype != twInt32 && ids->dtype != twInt64) {
    return fail(twInvalidArgument, "{} has dtype {}; it must be int32 or int64", Argument("ids"),
                dtype_text(ids->dtype));
  }
  TW_RETURN_IF_FAILED(check_routing_tensor("ids", *ids, shape.top_k));
  Status too_many;
  const int32_t sent = handle == nullptr ? shape.max_tokens : handle->max_tokens;
  const int32_t replicas = group.context.replicas.size;
  const int32_t most = replicas * sent;
  if (ids->shape[0] > most) {
    const Sentence since = handle == nullptr || sent == shape.max_tokens
                               ? Sentence(replicas > 1 ? "token_replicas * max_tokens" : "max_tokens")
                               : compose("what max_tokens was when the handle was made (make a new one by {})",
                                         Function{"twHandleCreateForLayer"});
    too_many = fail(twInvalidArgument, "{} has {} tokens; it must have from 0 to {}, {}", Argument("ids"),
                    ids->shape[0], since, most);
  }
  const bool weighted = weights != nullptr && (weights->data != nullptr || weights->ndim != 0);
  if (weighted) {
    if (weights->dtype != twFloat32) {
      return fail(twInvalidArgument, "{} has dtype {}; it must be float32", Argument("weights"),
                  dtype_text(weights->dtype));
    }
    TW_RETURN_IF_FAILED(check_routing_tensor("weights", *weights, shape.top_k));
    if (weights->shape[0] != ids->shape[0]) {
      return fail(twInvalidArgument, "{} has {} tokens; it must have as many as {}, {}", Argument("weights"),
                  weights->shape[0], Argument("ids"), ids->shape[0]);
    }
  }
  if (too_many.ok() && !group.backend->on_device()) TW_RETURN_IF_FAILED(check_id_values(shape, *ids));
  const int32_t tokens = too_many.ok() ? static_cast<int32_t>(ids->shape[0]) : 0;
  *routing = {ids, weighted ? weights : nullptr, tokens, std::move(too_many)};
  return {};
}

namespace {

// Finds the bound of a dispatch, whose rows and layout are known.
Status check_bound(const twGroup& group, const twHandle& handle, twLayout_t layout, int32_t given, DispatchCall* call) {
  const Shape& shape = call->rows.map.shape();
  const int32_t tokens = handle.routing.tokens;
  call->bound = given == 0 ? default_bound(shape, &handle) : given;
  if (call->bound > handle.max_tokens && call->bound <= shape.max_tokens && !shape.exact()) {
    return fail(twInvalidArgument,
                "{} is {}; the handle was made when max_tokens was {}, and has no room for more of each rank: make a "
                "new one by {}",
                Argument("input.bound"), Value(given), handle.max_tokens, Function{"twHandleCreateForLayer"});
  }
  const bool slots = group.shape().has_both_modes() && !shape.exact();
  if (slots && tokens > shape.max_tokens) {
    return fail(twInvalidArgument,
                "{} is {}; the handle has {} tokens, and low latency takes up to low_latency_tokens, {}: it must be {} "
                "or {}",
                Argument("output.layout"), Value(layout), tokens, shape.max_tokens, TW_CONSTANT(twFlat),
                TW_CONSTANT(twGrouped));
  }
  if (call->bound >= tokens && call->bound <= shape.max_tokens) return {};
  const char* const most = slots ? "low_latency_tokens" : "max_tokens";
  return fail(twInvalidArgument, "{} is {}; it must be from the handle's tokens, {}, to {}, {} (0 means {})",
              Argument("input.bound"), Value(given), tokens, most, shape.max_tokens, most);
}

}  // namespace

Status check_dispatch(twGroup& group, twHandle& handle, const twDispatchInput_t& input,
                      const twDispatchOutput_t& output, DispatchCall* call) {
  TW_RETURN_IF_FAILED(check_dispatch_rows(group, input, &call->rows));  // first: a refusal is of such rows
  TW_RETURN_IF_FAILED(group.backend->check_stream(input.stream));
  TW_RETURN_IF_FAILED(handle.too_many);
  call->stream = input.stream;
  TW_RETURN_IF_FAILED(check_layout("output.layout", output.layout, group));
  if (call->rows.map.shape().exact() && !handle.counts.exchanged) {
    return fail(twInvalidUsage, "the handle's counts have not been exchanged since it was routed; call {}",
                Function{"twExchangeCounts"});
  }
  TW_RETURN_IF_FAILED(check_bound(group, handle, output.layout, input.bound, call));
  TW_RETURN_IF_FAILED(check_switch("input.send_only", input.send_only));
  TW_RETURN_IF_FAILED(check_switch("input.uncounted", input.uncounted));
  call->counted = input.uncounted == 0;
  TW_RETURN_IF_FAILED(check_sm_limit(input.sm_limit));
  call->sm_limit = input.sm_limit;
  for (int q = 0; q < call->rows.payloads; ++q) {
    const twPayload_t& payload = call->rows.types[q];
    int64_t strides[2];
    TW_RETURN_IF_FAILED(
        check_rows({{"input.payloads[]", q}, payload.dtype, {handle.all.tokens}, payload.elements, false, false},
                   input.payloads[q], strides));
    const int64_t before = handle.all.tokens > 1 ? handle.all.begin * strides[0] : 0;
    call->payloads[q] = {static_cast<const std::byte*>(input.payloads[q].data) + before, strides[0]};
  }
  Extents written;
  Extents read;
  TW_RETURN_IF_FAILED(check_targets(group, handle, output, call->rows, call->bound, &call->targets, &written));
  const int64_t shown = layout_of(output.layout).by_expert ? 0 : call->targets.rows;
  call->rows.map = group.backend->places(call->rows.map, call->bound, shown);
  TW_RETURN_IF_FAILED(check_index_lists(group, output, call->bound, &call->targets, &written));
  TW_RETURN_IF_FAILED(check_outside(group, written));
  if (group.backend->on_device()) add_read(group, handle, *call, &read);
  return check_apart(written, read);
}

Status check_combine(twGroup& group, twHandle& handle, const twCombineInput_t& input, const twCombineOutput_t& output,
                     CombineCall* call) {
  TW_RETURN_IF_FAILED(check_combine_rows(group, input, &call->sent));
  const int64_t elements = call->sent.elements;
  TW_RETURN_IF_FAILED(group.backend->check_stream(input.stream));
  call->stream = input.stream;
  const char* why = handle.exact ? "after a dispatch of high throughput " : "after a dispatch of low latency ";
  if (!group.shape().has_both_modes()) why = nullptr;
  TW_RETURN_IF_FAILED(check_layout("input.layout", input.layout, handle.exact, why));
  if (input.weighting != twWeightNone && input.weighting != twWeightTopk) {
    return fail(twInvalidArgument, "{} is {}; it must be {} or {}", Argument("input.weighting"), Value(input.weighting),
                TW_CONSTANT(twWeightNone), TW_CONSTANT(twWeightTopk));
  }
  TW_RETURN_IF_FAILED(check_switch("input.send_only", input.send_only));
  TW_RETURN_IF_FAILED(check_sm_limit(input.sm_limit));
  call->sm_limit = input.sm_limit;
  for (const auto& [name, dtype] :
       {std::pair(Argument("input.rows"), input.rows.dtype), {"output.tokens", output.tokens.dtype}}) {
    if (is_summable(dtype)) continue;
    return fail(twInvalidArgument, "{} has dtype {}; it must be float32, bfloat16 or float16", name, dtype_text(dtype));
  }
  int64_t strides[2];
  const Layout& layout = layout_of(input.layout);
  const Lead lead = lead_of(group, handle, layout, handle.bound);
  TW_RETURN_IF_FAILED(check_packed("input.layout", input.layout, lead));
  TW_RETURN_IF_FAILED(check_rows({"input.rows", input.rows.dtype, lead.dimensions(), elements}, input.rows, strides));
  TW_RETURN_IF_FAILED(check_alive(group, handle, "input.rows", input.rows));
  call->rows = grid_of(handle, layout, input.rows, strides);
  TW_RETURN_IF_FAILED(
      check_rows({"output.tokens", output.tokens.dtype, {handle.all.tokens}, elements, true}, output.tokens, strides));
  call->bound = handle.bound;
  call->layout = input.layout;
  call->alignment = group.config.given.row_alignment;
  call->weighted = input.weighting == twWeightTopk;
  call->rows_dtype = input.rows.dtype;
  call->out_dtype = output.tokens.dtype;
  call->out_stride = elements * dtype_bytes(output.tokens.dtype);
  call->all_out = static_cast<std::byte*>(output.tokens.data);
  call->out = call->all_out + handle.all.begin * call->out_stride;
  // This rank's own partials need not go through the window under three conditions: they are rows as they would travel;
  // no peer can overwrite them once this rank has published (S3); and no sum can overwrite them before they are read.
  const int64_t rows_bytes = elements * dtype_bytes(input.rows.dtype);
  call->in_window = group.backend->peers_write(input.rows.data);
  const bool overlap = !disjoint(extent(call->rows, lead, rows_bytes),
                                 {call->all_out, call->all_out + handle.all.tokens * call->out_stride});
  call->apart = !call->in_window && !overlap;
  TW_RETURN_IF_FAILED(check_outside(group, "output.tokens", call->all_out));
  const Shape& shape = call->sent.map.shape();
  call->parts = shape.parts(call->bound);
  if (call->parts > 1 && overlap) {
    return fail(twInvalidArgument,
                "{} overlaps {}, which later parts of this combine still read; it must be apart where the bound of the "
                "dispatch, {}, is more than the inbox has room for, {} tokens",
                Argument("output.tokens"), Argument("input.rows"), call->bound, shape.part_tokens());
  }
  TW_RETURN_IF_FAILED(check_choice_values(group, handle, input, output, lead, call));
  TW_RETURN_IF_FAILED(check_per_expert(group, handle, input, call));
  TW_RETURN_IF_FAILED(check_bias(group, handle, input, output, call));
  call->keep_own = !layout.by_expert && !call->weighted && call->rows_dtype == call->sent.wire && call->apart;
  return {};
}

void fill_views(twGroup& group, const twHandle& handle, const DispatchCall& call, twDispatchOutput_t* output) {
  const twGroupConfig_t& config = group.config.given;
  const Layout& layout = layout_of(output->layout);
  const Lead lead = lead_of(group, handle, layout, call.bound);
  const auto shaped = [&](void* data, twDtype_t dtype, std::initializer_list<int64_t> row) {
    std::vector<int64_t> shape = lead.dimensions();
    shape.insert(shape.end(), row);
    return contiguous_tensor(data, dtype, shape);
  };
  for (int q = 0; q < call.rows.payloads; ++q) {
    const twPayload_t& payload = call.rows.types[q];
    void* data = call.targets.payloads[q];
    if (data == nullptr && layout.views()) {
      const bool has_offsets = call.has_offsets && call.receive_offset[q] != 0;
      data = has_offsets ? group.backend->window() + call.receive_offset[q]
                         : group.backend->view(call.rows.map, call.at, q);
    }
    const Columns& columns = call.targets.columns[q];
    output->payloads[q] = columns.wanted()
                              ? contiguous_tensor(data, payload.dtype, columns_shape(payload, columns, lead))
                              : shaped(data, payload.dtype, {payload.elements});
  }
  if (layout.by_expert) {
    output->ids = shaped(call.targets.ids, config.id_dtype, {});
    output->weights = shaped(call.targets.weights, twFloat32, {});
  } else {
    output->ids = shaped(call.targets.ids, config.id_dtype, {config.top_k});
    output->weights = shaped(call.targets.weights, twFloat32, {config.top_k});
  }
  const int64_t blocks = layout.blocks(group.ranks(), group.context.local_experts);
  output->counts = contiguous_tensor(call.targets.counts, twInt32, {blocks});
  fill_index_lists(call, output);
  if (!layout.by_expert) return;
  output->origins = contiguous_tensor(call.targets.origins, twInt64, lead.dimensions());
  output->source_counts = contiguous_tensor(call.targets.source_counts, twInt32, {blocks, group.ranks()});
  if (!layout.has_offsets()) return;
  output->offsets = contiguous_tensor(call.targets.offsets, twInt32, {blocks + 1});
}

}  // namespace tw::api
