// The entry points of tokenway/collectives.h: they check what a gather or reduce is given, find sizes and bound, and
// make a CollectiveCall of it, with places in the window and a digest of all that ranks must give alike. An argument
// that ranks may give differently and that is not in the digest lets them read each other's rows at wrong places (S10)
// instead of failing with twBoundMismatch.
#include <algorithm>
#include <functional>
#include <limits>
#include <numeric>

#include "api/check.h"
#include "api/enter.h"
#include "api/places.h"
#include "api/registry.h"
#include "api/rows.h"

namespace tw::api {
namespace {

// The ways in which sizes are given.
enum class Sizes { kHost, kMemory, kOwnInMemory, kOwn };

// What the two inputs have in common.
struct Given {
  twLayout_t layout;
  int32_t num_tensors;
  const twTensor_t* tensors;
  const int32_t* host_sizes;
  const twTensor_t* sizes;
  int32_t bound;
  int32_t send_only;
  void* stream;
  int32_t sm_limit;
};

Status find_sizes(const twGroup& group, const Given& given, Sizes* from) {
  const twTensor_t& sizes = *given.sizes;
  const bool tensor = sizes.data != nullptr || sizes.ndim != 0 || sizes.dtype != twDtypeNone;
  *from = given.host_sizes != nullptr ? Sizes::kHost : Sizes::kOwn;
  if (!tensor) return {};
  if (given.host_sizes != nullptr) {
    return fail(twInvalidArgument, "{} and {} are both given; it must be one of them", Argument("input.host_sizes"),
                Argument("input.sizes"));
  }
  if (sizes.dtype != twInt32 && sizes.dtype != twInt64) {
    return fail(twInvalidArgument, "{} has dtype {}; it must be int32 or int64", Argument("input.sizes"),
                dtype_text(sizes.dtype));
  }
  const int64_t count = sizes.ndim == 1 ? sizes.shape[0] : -1;
  if (count != 1 && count != group.ranks()) {
    return fail(twInvalidArgument, "{} has shape {}; it must be [{}], the sizes of all ranks, or [1]",
                Argument("input.sizes"), shape_text(sizes), group.ranks());
  }
  int64_t strides[2];
  TW_RETURN_IF_FAILED(check_rows({"input.sizes", sizes.dtype, {count}, 1, true}, sizes, strides));
  *from = count == group.ranks() ? Sizes::kMemory : Sizes::kOwnInMemory;
  return {};
}

// Finds the bound of a call: as given, or what follows from the sizes. `rows`: those of one rank's tensor.
Status find_bound(const twGroup& group, const Given& given, Sizes from, int64_t rows, int32_t* bound) {
  const int32_t most = group.config.given.max_tokens;
  int64_t wanted = given.bound;
  if (given.bound == 0 && from == Sizes::kHost) {
    wanted = std::max(1, *std::max_element(given.host_sizes, given.host_sizes + group.ranks()));
  } else if (given.bound == 0) {
    wanted = from == Sizes::kOwn ? most : rows;
  }
  if (wanted < 1 || wanted > most) {
    return fail(twInvalidArgument,
                "{} is {}, so the bound is {}; it must be from 1 to max_tokens, {} (0 means what the sizes say)",
                Argument("input.bound"), Value(given.bound), wanted, most);
  }
  *bound = static_cast<int32_t>(wanted);
  return {};
}

// Takes the sizes over, as far as the host can read them. `rows`: those of this rank's own tensor, input or output.
Status take_sizes(const twGroup& group, const Given& given, Sizes from, const Argument& rows_name, int64_t rows,
                  CollectiveCall* call) {
  call->all_sizes = from == Sizes::kHost || from == Sizes::kMemory;
  const int count = call->all_sizes ? group.ranks() : 1;
  if (from == Sizes::kHost) call->sizes.assign(given.host_sizes, given.host_sizes + count);
  if (from == Sizes::kOwn) call->sizes.assign(1, static_cast<int32_t>(std::min<int64_t>(rows, INT32_MAX)));
  const bool in_memory = from == Sizes::kMemory || from == Sizes::kOwnInMemory;
  if (in_memory && group.backend->on_device()) {
    call->sizes_at = given.sizes->data;
    call->wide_sizes = given.sizes->dtype == twInt64;
  }
  for (int rank = 0; in_memory && !group.backend->on_device() && rank < count; ++rank) {
    const int64_t size = given.sizes->dtype == twInt64 ? static_cast<const int64_t*>(given.sizes->data)[rank]
                                                       : static_cast<const int32_t*>(given.sizes->data)[rank];
    TW_RETURN_IF_FAILED(check_range({"input.sizes[]", rank}, size, 0, call->bound));
    call->sizes.push_back(static_cast<int32_t>(size));
  }
  for (int rank = 0; from == Sizes::kHost && rank < count; ++rank) {
    TW_RETURN_IF_FAILED(check_range({"input.host_sizes[]", rank}, call->sizes[rank], 0, call->bound));
  }
  const int64_t wanted = in_memory              ? call->bound
                         : from == Sizes::kHost ? call->sizes[group.me()]
                                                : std::min<int64_t>(rows, call->bound);
  call->rows = static_cast<int32_t>(wanted);
  if (rows == wanted) return {};
  return fail(twInvalidArgument, "{} has {} rows; it must have {}{}, {}", rows_name, rows,
              from == Sizes::kOwn ? "from 0 to " : "", wanted,
              in_memory              ? Sentence("the bound, as sizes are in memory")
              : from == Sizes::kHost ? compose("this rank's of {}", Argument("input.host_sizes"))
                                     : Sentence("the bound"));
}

// Elements of a row: the product of the dimensions after the first few.
int64_t elements_of(const twTensor_t& tensor, int lead) {
  int64_t product = 1;
  for (int i = lead; i < std::min(tensor.ndim, TW_MAX_DIMS); ++i) {
    const int64_t extent = tensor.shape[i];
    if (extent < 1 || product > std::numeric_limits<int32_t>::max() * int64_t{16} / extent) return 0;
    product *= extent;
  }
  return product;
}

// Checks a tensor before its rows are looked at; gives the elements of a row.
Status check_kind(const Argument& name, const twTensor_t& tensor, int lead, bool summed, int64_t* elements) {
  if (tensor.ndim < lead || tensor.ndim > TW_MAX_DIMS) {
    return fail(twInvalidArgument, "{} has {} dimensions; it must have from {} to {}", name, tensor.ndim, lead,
                TW_MAX_DIMS);
  }
  if (summed ? !is_summable(tensor.dtype) : dtype_bytes(tensor.dtype) == 0) {
    return fail(twInvalidArgument, "{} has dtype {}; it must be {}", name, dtype_text(tensor.dtype),
                summed ? "float32, bfloat16 or float16" : "one of twDtype_t");
  }
  *elements = elements_of(tensor, lead);
  if (*elements > 0) return {};
  return fail(twInvalidArgument, "{} has shape {}; a row must have from 1 to 2^35 elements", name, shape_text(tensor));
}

Status check_common(const twGroup& group, const Given& given, const Argument& layout_name) {
  TW_RETURN_IF_FAILED(group.backend->check_stream(given.stream));
  if (given.layout != twFlat && given.layout != twRankMajor) {
    return fail(twInvalidArgument, "{} is {}; it must be {} or {}", layout_name, Value(given.layout),
                TW_CONSTANT(twFlat), TW_CONSTANT(twRankMajor));
  }
  TW_RETURN_IF_FAILED(check_range("input.num_tensors", given.num_tensors, 1, TW_MAX_PAYLOADS));
  return check_switch("input.send_only", given.send_only);
}

// Finds the places in the window, and the digest of what ranks must have alike.
Status place(const twGroup& group, const Given& given, CollectiveCall* call) {
  uint64_t row_bytes[kMaxPayloads];
  uint64_t all = 0;
  uint32_t digest = mix_digest(kDigestSeed, call->reduces ? 1 : 0);
  digest = mix_digest(digest, call->flat && !call->reduces ? 1 : 0);  // a gather's layout decides on its bank
  digest = mix_digest(digest, static_cast<uint64_t>(given.num_tensors));
  for (int32_t q = 0; q < given.num_tensors; ++q) {
    const CollectiveTensor& tensor = call->tensors[q];
    row_bytes[q] = static_cast<uint64_t>(tensor.elements) * static_cast<uint64_t>(dtype_bytes(tensor.from));
    all += row_bytes[q];
    digest = mix_digest(digest, row_bytes[q]);
    if (call->reduces) digest = mix_digest(digest, static_cast<uint64_t>(tensor.from));
  }
  digest = mix_digest(digest, call->all_sizes ? 1 : 0);
  if (call->all_sizes) {
    for (const int32_t size : call->sizes) digest = mix_digest(digest, static_cast<uint64_t>(size));
  }
  call->digest = mix_rows(digest, group.context.growth);
  constexpr uint64_t kLargest = 16u << 20;  // kernels count the pieces of rows in 32 bits
  if (group.backend->on_device() && all > kLargest) {
    return fail(twInvalidArgument, "{} have rows of {}; on a device they may have {}", Argument("input.tensors"),
                bytes_text(all), bytes_text(kLargest));
  }
  int64_t pieces = 0;
  for (int32_t q = 0; q < given.num_tensors; ++q) pieces += static_cast<int64_t>(row_bytes[q] / 2048 + 1);
  if (group.backend->on_device() && pieces * group.ranks() > INT32_MAX / call->bound) {
    return fail(
        twInvalidArgument,
        "{} is {}, so the bound is {}; with rows in {} pieces of 2 KiB for {} ranks it must be up to {} on a device",
        Argument("input.bound"), Value(given.bound), call->bound, pieces, group.ranks(),
        INT32_MAX / (pieces * group.ranks()));
  }
  if (group.backend->on_device() && given.host_sizes != nullptr && group.ranks() > kMostHostSizes) {
    return fail(twInvalidArgument,
                "the host knows the sizes of {} ranks; on a device it may know those of {}, and {} tell more",
                group.ranks(), kMostHostSizes, Argument("input.sizes"));
  }
  call->places = CollectiveMap::make(group.ranks(), call->bound, row_bytes, given.num_tensors);
  const uint64_t room = group.context.map.bank_bytes();
  if (call->places.bytes <= room) return {};
  return fail(twInvalidArgument,
              "{} need {} of the window: rows of {} bytes for a bound of {} on {} ranks; a bank of this group holds "
              "{}. Create it with larger rows or max_tokens, or give a smaller bound",
              Argument("input.tensors"),
              call->places.bytes == UINT64_MAX ? "more than 2^63 bytes" : bytes_text(call->places.bytes), all,
              call->bound, group.ranks(), bytes_text(room));
}

// The memory that the tensors of a call touch.
struct Touched {
  Extents in;
  Extents out;
};

// Checks an output beside its own input; check_apart looks at the other pairs.
Status check_overlap(int32_t q, const Extent& in, const Extent& out, bool in_place, Touched* touched) {
  touched->in.add({"input.tensors[]", q}, in);
  touched->out.add({"output.tensors[]", q}, out);
  if (in_place || disjoint(in, out)) return {};
  return fail(twInvalidArgument,
              "{} overlaps {}; it may be this rank's own rows of it, in place, and else must be apart",
              Argument("output.tensors[]", q), Argument("input.tensors[]", q));
}

// The row of flat tensors where this rank's rows begin; -1 if the host does not know.
int64_t own_begin(const twGroup& group, const CollectiveCall& call) {
  if (!call.all_sizes || call.sizes.empty()) return -1;
  return std::accumulate(call.sizes.begin(), call.sizes.begin() + group.me(), int64_t{0});
}

// How many rows flat tensors have.
int64_t flat_rows(const twGroup& group, const CollectiveCall& call, Sizes from) {
  if (from == Sizes::kHost) return std::accumulate(call.sizes.begin(), call.sizes.end(), int64_t{0});
  return int64_t{group.ranks()} * call.bound;
}

std::vector<int64_t> lead_of(const twGroup& group, const CollectiveCall& call, Sizes from) {
  if (call.flat) return {flat_rows(group, call, from)};
  return {group.ranks(), call.bound};
}

// Notes whether an input is a view of the window, and refuses one that is over.
Status check_window(twGroup& group, int32_t q, CollectiveCall* call) {
  if (!group.backend->in_window(call->tensors[q].in)) return {};
  call->in_window = true;
  if (window_is_alive(group, call->tensors[q].in)) return {};
  return fail(
      twInvalidUsage,
      "{} is a view of the window, and its lane has made another step since; give other memory, or make the view again",
      Argument("input.tensors[]", q));
}

Status check_gather_tensor(twGroup& group, int32_t q, const twTensor_t& in, const twTensor_t& out, Sizes from,
                           CollectiveCall* call, Touched* touched) {
  const Argument name("input.tensors[]", q);
  int64_t elements = 0;
  int64_t strides[2];
  TW_RETURN_IF_FAILED(check_kind(name, in, 1, false, &elements));
  TW_RETURN_IF_FAILED(check_rows({name, in.dtype, {call->rows}, elements, false, false}, in, strides));
  CollectiveTensor& tensor = call->tensors[q];
  tensor.in = static_cast<const std::byte*>(in.data);
  tensor.row_stride = strides[0];
  tensor.from = tensor.to = in.dtype;
  tensor.elements = elements;
  const int64_t row_bytes = elements * dtype_bytes(in.dtype);
  tensor.out_stride = row_bytes;
  if (call->rows <= 1) tensor.row_stride = row_bytes;
  TW_RETURN_IF_FAILED(check_window(group, q, call));
  const Extent read = extent_of(tensor.in, call->rows, tensor.row_stride, row_bytes);
  if (out.data == nullptr) return touched->in.add(name, read), Status{};
  const std::vector<int64_t> lead = lead_of(group, *call, from);
  const RowsWanted wanted{{"output.tensors[]", q}, in.dtype, lead, elements, true, false};
  TW_RETURN_IF_FAILED(check_rows(wanted, out, strides));
  tensor.out = static_cast<std::byte*>(out.data);
  const int64_t rows = std::accumulate(lead.begin(), lead.end(), int64_t{1}, std::multiplies<>());
  const int64_t begin = call->flat ? own_begin(group, *call) : int64_t{group.me()} * call->bound;
  const bool in_place = begin >= 0 && tensor.row_stride == row_bytes && tensor.in == tensor.out + begin * row_bytes;
  return check_overlap(q, read, extent_of(tensor.out, rows, row_bytes, row_bytes), in_place, touched);
}

Status check_optional(const Argument& name, const twTensor_t& tensor, int64_t count, int32_t** data) {
  if (tensor.data == nullptr) return {};
  int64_t strides[2];
  TW_RETURN_IF_FAILED(check_rows({name, twInt32, {count}, 1, true}, tensor, strides));
  *data = static_cast<int32_t*>(tensor.data);
  return {};
}

Status check_gather(twGroup& group, const twAllGatherVInput_t& input, const twAllGatherVOutput_t& output, Sizes* from,
                    CollectiveCall* call) {
  const Given given{output.layout, input.num_tensors, input.tensors, input.host_sizes, &input.sizes,
                    input.bound,   input.send_only,   input.stream,  input.sm_limit};
  TW_RETURN_IF_FAILED(check_common(group, given, "output.layout"));
  call->flat = given.layout == twFlat;
  call->views = !call->flat;  // wanted or not: the bank that it decides on must not depend on what one rank wants
  call->stream = given.stream;
  call->send_only = given.send_only != 0;
  call->sm_limit = given.sm_limit;
  const int64_t rows = input.tensors[0].ndim > 0 ? input.tensors[0].shape[0] : 0;
  TW_RETURN_IF_FAILED(find_sizes(group, given, from));
  TW_RETURN_IF_FAILED(find_bound(group, given, *from, rows, &call->bound));
  TW_RETURN_IF_FAILED(take_sizes(group, given, *from, {"input.tensors[]", 0}, rows, call));
  Touched touched;
  for (int32_t q = 0; q < given.num_tensors; ++q) {
    TW_RETURN_IF_FAILED(check_gather_tensor(group, q, input.tensors[q], output.tensors[q], *from, call, &touched));
  }
  TW_RETURN_IF_FAILED(check_optional("output.counts", output.counts, group.ranks(), &call->counts));
  TW_RETURN_IF_FAILED(check_optional("output.offsets", output.offsets, group.ranks() + 1, &call->offsets));
  touched.out.add_contiguous("output.counts", output.counts);
  touched.out.add_contiguous("output.offsets", output.offsets);
  touched.in.add_contiguous("input.sizes", input.sizes);
  TW_RETURN_IF_FAILED(check_apart(touched.out, touched.in, true));
  TW_RETURN_IF_FAILED(place(group, given, call));
  TW_RETURN_IF_FAILED(check_outside(group, touched.out));
  return check_sm_limit(given.sm_limit);  // last: a refusal moves as much as the peers' calls, which is known now
}

Status check_reduce_tensor(twGroup& group, int32_t q, const twTensor_t& in, const twTensor_t& out, Sizes from,
                           CollectiveCall* call, Touched* touched) {
  const Argument name("input.tensors[]", q);
  const Argument out_name("output.tensors[]", q);
  int64_t elements = 0;
  int64_t strides[2];
  TW_RETURN_IF_FAILED(check_kind(name, in, call->flat ? 1 : 2, true, &elements));
  const std::vector<int64_t> lead = lead_of(group, *call, from);
  TW_RETURN_IF_FAILED(check_rows({name, in.dtype, lead, elements}, in, strides));
  CollectiveTensor& tensor = call->tensors[q];
  tensor.in = static_cast<const std::byte*>(in.data);
  tensor.block_stride = call->flat ? 0 : strides[0];
  tensor.row_stride = call->flat ? strides[0] : strides[1];
  tensor.from = in.dtype;
  tensor.elements = elements;
  int64_t same = 0;
  TW_RETURN_IF_FAILED(check_kind(out_name, out, 1, true, &same));
  TW_RETURN_IF_FAILED(check_rows({out_name, out.dtype, {call->rows}, elements, true}, out, strides));
  tensor.to = out.dtype;
  tensor.out = static_cast<std::byte*>(out.data);
  tensor.out_stride = elements * dtype_bytes(out.dtype);
  TW_RETURN_IF_FAILED(check_window(group, q, call));
  const int64_t row_bytes = elements * dtype_bytes(in.dtype);
  const int64_t begin = own_begin(group, *call);
  const bool knows = !call->flat || begin >= 0;
  const int64_t before = call->flat ? begin * tensor.row_stride : group.me() * tensor.block_stride;
  const bool in_place = knows && tensor.from == tensor.to && tensor.in + before == tensor.out &&
                        (call->rows <= 1 || tensor.row_stride == tensor.out_stride);
  const Extent block = extent_of(tensor.in, lead.back(), tensor.row_stride, row_bytes);
  const int64_t span = call->flat ? 0 : (group.ranks() - 1) * tensor.block_stride;
  const Extent all{block.begin + std::min<int64_t>(span, 0), block.end + std::max<int64_t>(span, 0)};
  return check_overlap(q, lead.back() == 0 ? Extent{block.begin, block.begin} : all,
                       extent_of(tensor.out, call->rows, tensor.out_stride, tensor.out_stride), in_place, touched);
}

Status check_reduce(twGroup& group, const twReduceScatterVInput_t& input, const twReduceScatterVOutput_t& output,
                    CollectiveCall* call) {
  Given given{input.layout, input.num_tensors, input.tensors, input.host_sizes, &input.sizes,
              input.bound,  input.send_only,   input.stream,  input.sm_limit};
  TW_RETURN_IF_FAILED(check_common(group, given, "input.layout"));
  call->reduces = true;
  call->flat = given.layout == twFlat;
  call->stream = given.stream;
  call->send_only = given.send_only != 0;
  call->sm_limit = given.sm_limit;
  Sizes from = Sizes::kOwn;
  TW_RETURN_IF_FAILED(find_sizes(group, given, &from));
  const int64_t rows = output.tensors[0].ndim > 0 ? output.tensors[0].shape[0] : 0;
  std::vector<int32_t> equal;
  if (call->flat && from == Sizes::kOwn) {
    const int64_t all = input.tensors[0].ndim > 0 ? input.tensors[0].shape[0] : 0;
    if (all < 0 || all % group.ranks() != 0 || all / group.ranks() > group.config.given.max_tokens) {
      return fail(twInvalidArgument,
                  "{} has {} rows and no sizes are given; it must be an equal share of up to {} for each of {} ranks",
                  Argument("input.tensors[]", 0), all, group.config.given.max_tokens, group.ranks());
    }
    equal.assign(group.ranks(), static_cast<int32_t>(all / group.ranks()));
    given.host_sizes = equal.data();
    from = Sizes::kHost;
  }
  if (call->flat && from == Sizes::kOwnInMemory) {
    return fail(twInvalidArgument, "{} has shape [1]; of {} it must be [{}]: rows of all ranks follow each other",
                Argument("input.sizes"), TW_CONSTANT(twFlat), group.ranks());
  }
  TW_RETURN_IF_FAILED(find_bound(group, given, from, rows, &call->bound));
  TW_RETURN_IF_FAILED(take_sizes(group, given, from, {"output.tensors[]", 0}, rows, call));
  Touched touched;
  for (int32_t q = 0; q < given.num_tensors; ++q) {
    TW_RETURN_IF_FAILED(check_reduce_tensor(group, q, input.tensors[q], output.tensors[q], from, call, &touched));
  }
  touched.in.add_contiguous("input.sizes", input.sizes);
  TW_RETURN_IF_FAILED(check_apart(touched.out, touched.in, true));
  TW_RETURN_IF_FAILED(place(group, given, call));
  TW_RETURN_IF_FAILED(check_outside(group, touched.out));
  return check_sm_limit(given.sm_limit);  // last: a refusal moves as much as the peers' calls, which is known now
}

// Completes the caller's tensors: shapes, and views where no memory was given.
void fill_gathered(const twGroup& group, const CollectiveCall& call, Sizes from, twAllGatherVOutput_t* output) {
  for (int32_t q = 0; q < call.places.tensors; ++q) {
    const CollectiveTensor& tensor = call.tensors[q];
    std::vector<int64_t> shape = lead_of(group, call, from);
    shape.push_back(tensor.elements);
    void* const data = tensor.out == nullptr && !call.flat ? group.backend->view_gathered(call, q) : tensor.out;
    output->tensors[q] = contiguous_tensor(data, tensor.from, shape);
  }
  output->counts = contiguous_tensor(call.counts, twInt32, {group.ranks()});
  output->offsets = contiguous_tensor(call.offsets, twInt32, {group.ranks() + 1});
}

}  // namespace
}  // namespace tw::api

using tw::Status;
using tw::api::enter_group;

twResult_t twAllGatherV(twGroup_t group, const twAllGatherVInput_t* given, twAllGatherVOutput_t* output) {
  return enter_group("twAllGatherV", group, [&]() -> Status {
    TW_RETURN_IF_FAILED(tw::check_usable(*group, twPhaseGather));
    twAllGatherVInput_t input = TW_ALL_GATHER_V_INPUT_INIT;
    twAllGatherVOutput_t out = TW_ALL_GATHER_V_OUTPUT_INIT;
    tw::CollectiveCall call;
    tw::api::Sizes from{};
    Status status = tw::api::read_struct("input", given, &input);  // first: it names the channel that peers wait on
    // Nothing can be sent on a stream that is no good, not even the refusal.
    if (status.ok() && group->backend->on_device()) TW_RETURN_IF_FAILED(group->backend->check_stream(input.stream));
    if (status.ok()) status = tw::api::read_struct("output", output, &out);
    if (status.ok()) status = tw::api::check_gather(*group, input, out, &from, &call);
    if (!status.ok()) {
      const bool views = out.layout == twRankMajor;
      return tw::refuse_collective(*group, twPhaseGather, views, call, input.lane, input.stream, std::move(status));
    }
    int64_t request = 0;
    status = tw::collect(*group, &call, input.lane, &request);
    if (call.at.channel < 0) return status;
    tw::api::fill_gathered(*group, call, from, &out);
    out.request = request;
    TW_RETURN_IF_FAILED(tw::api::write_struct("output", out, output));
    return status;
  });
}

twResult_t twReduceScatterV(twGroup_t group, const twReduceScatterVInput_t* given, twReduceScatterVOutput_t* output) {
  return enter_group("twReduceScatterV", group, [&]() -> Status {
    TW_RETURN_IF_FAILED(tw::check_usable(*group, twPhaseReduce));
    twReduceScatterVInput_t input = TW_REDUCE_SCATTER_V_INPUT_INIT;
    twReduceScatterVOutput_t out = TW_REDUCE_SCATTER_V_OUTPUT_INIT;
    tw::CollectiveCall call;
    Status status = tw::api::read_struct("input", given, &input);
    if (status.ok() && group->backend->on_device()) TW_RETURN_IF_FAILED(group->backend->check_stream(input.stream));
    if (status.ok()) status = tw::api::read_struct("output", output, &out);
    if (status.ok()) status = tw::api::check_reduce(*group, input, out, &call);
    if (!status.ok()) {
      return tw::refuse_collective(*group, twPhaseReduce, false, call, input.lane, input.stream, std::move(status));
    }
    status = tw::collect(*group, &call, input.lane, &out.request);
    if (call.send_only && status.ok()) TW_RETURN_IF_FAILED(tw::api::write_struct("output", out, output));
    return status;
  });
}

twResult_t twCompleteRequest(twGroup_t group, int64_t request, void* stream) {
  return enter_group("twCompleteRequest", group, [&]() -> Status {
    TW_RETURN_IF_FAILED(group->backend->check_stream(stream));
    return tw::complete_request(*group, request, stream);
  });
}
