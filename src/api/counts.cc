// What an exchange of counts may name: its own limits in place of the group's, within those that the group's window and
// the graphs that hold calls of the handle leave. Takes twCountsInput_t, gives a CountsCall.
//
// A room beyond the group's lets peers write past a bank (S10); one that grows under a captured dispatch lets its
// replays write past the caller's tensors.
#include <utility>

#include "api/check.h"

namespace tw::api {
namespace {

// Fails where a graph has calls that go on with other numbers than these.
Status check_captured(twGroup& group, const twHandle& handle, const CountsCall& call) {
  const CountsCall& last = handle.counting;
  if (last.room == 0 || (!handle.in_graph && !group.backend->captures(call.stream))) return {};
  const std::pair<Argument, std::pair<int32_t, int32_t>> kept[] = {
      {"input.max_recv_tokens", {call.room, last.room}}, {"input.row_alignment", {call.alignment, last.alignment}}};
  for (const auto& [name, values] : kept) {
    if (values.first == values.second) continue;
    return fail(twInvalidUsage,
                "{} is {}, but was {} in the handle's last exchange of counts, with which a captured graph goes on; "
                "exchange with the same, or create a handle",
                name, Value(values.first), values.second);
  }
  return {};
}

}  // namespace

Status check_counts(twGroup& group, const twHandle& handle, const twCountsInput_t& input, CountsCall* call,
                    std::vector<std::byte*>* leases) {
  TW_RETURN_IF_FAILED(handle.too_many);
  TW_RETURN_IF_FAILED(check_switch("input.send_only", input.send_only));
  if (handle.counts.exchanged && group.leases == nullptr) {
    return fail(twInvalidUsage, "the handle's counts have been exchanged since it was routed");
  }
  // Rows that are dropped have places too, and peers whose handles are larger may have more of them.
  const bool drops = group.config.given.overflow == twOverflowDrop;
  if (drops && !handle.counts.exchanged) TW_RETURN_IF_FAILED(check_size(group, handle));
  call->stream = input.stream;
  call->send_only = input.send_only != 0;
  TW_RETURN_IF_FAILED(check_sm_limit(input.sm_limit));
  call->sm_limit = input.sm_limit;
  call->room = static_cast<int32_t>(handle.most_rows);  // the group's, unless it has grown since
  if (input.max_recv_tokens != 0) {
    TW_RETURN_IF_FAILED(check_range("input.max_recv_tokens", input.max_recv_tokens, 1, call->room));
    call->room = input.max_recv_tokens;
  }
  call->alignment = group.config.given.row_alignment;
  if (input.row_alignment != 0) {
    TW_RETURN_IF_FAILED(check_row_alignment("input.row_alignment", input.row_alignment));
    call->alignment = input.row_alignment;
  }
  TW_RETURN_IF_FAILED(check_captured(group, handle, *call));
  return check_receive_offsets(group, input, call, leases);
}

}  // namespace tw::api
