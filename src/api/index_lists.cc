// Index lists of a dispatch: what the caller may give for them, how long they are, and the outputs that are filled in.
// Takes a twDispatchOutput_t, gives DispatchTargets::lists. What passes is written without further checks: memory of
// another length would be written beyond its end.
#include "api/check.h"
#include "api/enter.h"
#include "api/registry.h"
#include "api/rows.h"

namespace tw::api {
namespace {

// One of the lists: its name, its field, and what it has instead of shape.
struct List {
  Argument name;
  twTensor_t twDispatchOutput_t::*tensor;
  int32_t* IndexLists::*data;
};
constexpr List kLists[] = {
    {"output.sorted_rows", &twDispatchOutput_t::sorted_rows, &IndexLists::sorted_rows},
    {"output.block_experts", &twDispatchOutput_t::block_experts, &IndexLists::block_experts},
    {"output.num_sorted", &twDispatchOutput_t::num_sorted, &IndexLists::num_sorted},
};

int64_t length_of(const List& list, const IndexLists& lists) {
  if (list.data == &IndexLists::num_sorted) return 1;
  return list.data == &IndexLists::block_experts ? lists.capacity / lists.block : lists.capacity;
}

// Finds how long the lists of `rows` rows are. `rows_name`, `block_name`: as the caller knows them.
Status size_lists(const twGroup& group, int64_t rows, const Argument& block_name, int32_t block, IndexLists* lists) {
  TW_RETURN_IF_FAILED(check_range(block_name, block, 1, TW_MAX_INDEX_BLOCK));
  const int64_t top_k = group.shape().top_k;
  const int64_t capacity = index_capacity(rows, top_k, group.context.local_experts, block);
  if (std::max(capacity, rows * top_k) > INT32_MAX) {
    return fail(twInvalidArgument,
                "{} is {}; the index lists of {} rows would have {} places for {} choices, more than {}, the most that "
                "32 bits tell apart",
                block_name, Value(block), rows, capacity, rows * top_k, INT32_MAX);
  }
  lists->block = block;
  lists->none = static_cast<int32_t>(rows * top_k);
  lists->capacity = static_cast<int32_t>(capacity);
  return {};
}

}  // namespace

Status check_index_lists(const twGroup& group, const twDispatchOutput_t& output, int32_t bound,
                         DispatchTargets* targets, Extents* written) {
  const Argument block("output.index_block");
  const Layout& layout = layout_of(output.layout);
  if (output.index_block == 0) {
    for (const List& list : kLists) {
      const void* const data = (output.*list.tensor).data;
      if (data == nullptr) continue;
      return fail(twInvalidArgument, "{} has data {}; it must be NULL where {} is 0", list.name, data, block);
    }
    return {};
  }
  if (layout.by_expert) {
    return fail(twInvalidArgument, "{} is {}; it must be 0 in this layout, as only {} and {} have index lists", block,
                Value(output.index_block), TW_CONSTANT(twRankMajor), TW_CONSTANT(twFlat));
  }
  const int64_t rows = layout.exact ? targets->rows : int64_t{group.ranks()} * bound;
  TW_RETURN_IF_FAILED(size_lists(group, rows, block, output.index_block, &targets->lists));
  for (const List& list : kLists) {
    const twTensor_t& tensor = output.*list.tensor;
    if (tensor.data == nullptr) continue;
    int64_t strides[2];
    const RowsWanted wanted{list.name, twInt32, {length_of(list, targets->lists)}, 1, true, true, true};
    TW_RETURN_IF_FAILED(check_rows(wanted, tensor, strides));
    targets->lists.*list.data = static_cast<int32_t*>(tensor.data);
    written->add_contiguous(list.name, tensor);
  }
  return {};
}

void fill_index_lists(const DispatchCall& call, twDispatchOutput_t* output) {
  const IndexLists& lists = call.targets.lists;
  for (const List& list : kLists) {
    if (lists.block == 0) break;
    output->*list.tensor = contiguous_tensor(lists.*list.data, twInt32, {length_of(list, lists)});
  }
}

}  // namespace tw::api

twResult_t twGroupIndexCapacity(twGroup_t group, int64_t rows, int32_t block, int64_t* capacity) {
  return tw::api::visit(tw::api::groups, "group", group, [&]() -> tw::Status {
    TW_CHECK_NOT_NULL(capacity);
    TW_RETURN_IF_FAILED(tw::check_range("rows", rows, 0, INT32_MAX));
    tw::IndexLists lists;
    TW_RETURN_IF_FAILED(tw::api::size_lists(*group, rows, "block", block, &lists));
    *capacity = lists.capacity;
    return {};
  });
}
