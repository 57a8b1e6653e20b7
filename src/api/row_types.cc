// What the rows of a call consist of: those that the group was made with, or those that the call names, within the room
// that the group's window has; and of which mode the call is. Takes the structs of a call, gives its DispatchRows or
// CombineRows.
//
// The digest goes into the step's note, where ranks that name different rows meet it (exchange/notes.h). A map that is
// made of rows larger than the room would put them over each other's, and over other channels (S10).
#include "api/check.h"
#include "api/rows.h"
#include "exchange/notes.h"
#include "layout/fp8_rows.h"
#include "quantize/wire.h"

namespace tw::api {
namespace {

// The digest is 0 for the group's own rows alone, before the growth is mixed in.
uint32_t nonzero(uint32_t digest) { return digest == 0 ? 1 : digest; }

Status check_type(const Argument& dtype, const Argument& elements, const twPayload_t& type, uint64_t most) {
  TW_RETURN_IF_FAILED(check_range(dtype, type.dtype, twDtypeNone + 1, twBool));
  return check_range(elements, type.elements, 1, static_cast<int64_t>(most / dtype_bytes(type.dtype)));
}

bool same(const twPayload_t& one, const twPayload_t& other) {
  return one.dtype == other.dtype && one.elements == other.elements;
}

}  // namespace

bool is_exact(const twGroup& group, twLayout_t layout, int32_t bound) {
  if (!group.shape().has_both_modes()) return group.shape().exact();
  const Layout* const known = find_layout(layout);
  return known != nullptr ? known->exact : bound <= 0 || bound > group.shape().low_latency_tokens;
}

namespace {

// The map of a call, and what its notes say of it beside its rows.
WindowMap map_of(const twGroup& group, bool exact) {
  const WindowMap& map = group.context.map;
  return map.shape().has_both_modes() && !exact ? map.for_low_latency() : map;
}
uint32_t digest_of(const twGroup& group, bool exact) {
  const bool slots = group.shape().has_both_modes() && !exact;
  return mix_rows(slots ? kSlotsDigest : 0, group.context.growth);
}

}  // namespace

DispatchRows own_rows(const twGroup& group, bool exact) {
  const twGroupConfig_t& config = group.config.given;
  DispatchRows rows;
  rows.map = map_of(group, exact);
  rows.own = true;
  rows.digest = digest_of(group, exact);
  rows.payloads = config.num_payloads;
  std::copy_n(config.payloads, config.num_payloads, rows.types);
  return rows;
}

Status check_dispatch_rows(const twGroup& group, const twDispatchInput_t& input, DispatchRows* rows) {
  if (input.num_types == 0) return {};
  const twGroupConfig_t& config = group.config.given;
  const uint64_t most = group.shape().most_dispatch_bytes();
  TW_RETURN_IF_FAILED(check_range("input.num_types", input.num_types, 0, TW_MAX_PAYLOADS));
  uint64_t bytes[kMaxPayloads] = {};
  uint64_t all = 0;
  bool own = input.num_types == config.num_payloads;
  uint32_t digest = mix_digest(kDigestSeed, static_cast<uint64_t>(input.num_types));
  for (int q = 0; q < input.num_types; ++q) {
    const twPayload_t& type = input.types[q];
    TW_RETURN_IF_FAILED(check_type({"input.types[].dtype", q}, {"input.types[].elements", q}, type, most));
    bytes[q] = static_cast<uint64_t>(type.elements) * dtype_bytes(type.dtype);
    all += bytes[q];
    own = own && same(type, config.payloads[q]);
    digest = mix_digest(mix_digest(digest, static_cast<uint64_t>(type.dtype)), static_cast<uint64_t>(type.elements));
  }
  if (all > most) {
    return fail(twInvalidArgument, "{} takes rows of {} bytes; {} has room for {}", Argument("input.types[]"), all,
                Argument("config.dispatch_room"), most);
  }
  if (own) return {};
  rows->map = rows->map.for_dispatch(input.num_types, bytes);
  rows->payloads = input.num_types;
  std::copy_n(input.types, input.num_types, rows->types);
  rows->own = false;
  rows->digest = mix_rows(nonzero(digest), rows->digest);
  return {};
}

CombineRows own_combine_rows(const twGroup& group, bool exact) {
  const twGroupConfig_t& config = group.config.given;
  return {map_of(group, exact), config.combine_dtype, config.combine_elements, digest_of(group, exact), false};
}

namespace {

// Adds the values of choices beside the rows. Whether there is room for both is looked at when the rows are known.
void add_values(const twCombineInput_t& input, CombineRows* rows) {
  rows->values = is_given(input.choice_values);
  if (rows->values) rows->digest = mix_rows(kChoiceValuesDigest, rows->digest);
}

Status check_room(const twGroup& group, const CombineRows& rows) {
  const Shape& shape = rows.map.shape();
  const uint64_t bytes = shape.combine_bytes + choice_bytes(shape.top_k);
  const uint64_t most = group.shape().most_combine_bytes();
  if (!rows.values || bytes <= most) return {};
  return fail(twInvalidArgument, "{} takes {} bytes beside a row, {} together; {} has room for {}",
              Argument("input.choice_values"), choice_bytes(shape.top_k), bytes, Argument("config.combine_room"), most);
}

// Checks the scales of rows whose type is known.
Status check_scales(const twCombineInput_t& input, twDtype_t wire) {
  const Argument scales("input.wire_scales");
  const Argument scale("input.wire_scale");
  const bool given = input.wire_scales == twScalesTensor;
  if (wire != twFloat8e4m3) {
    if (input.wire_scale != 0.0f) {
      return fail(twInvalidArgument, "{} is {}; rows of {} have no scale, so it must be 0", scale,
                  double{input.wire_scale}, dtype_text(wire));
    }
    if (input.wire_scales == twScalesNone) return {};
    return fail(twInvalidArgument, "{} is {}; rows of {} have no scales, so it must be {}", scales,
                Value(input.wire_scales), dtype_text(wire), TW_CONSTANT(twScalesNone));
  }
  if (!given && input.wire_scales != twScalesBlocks) {
    return fail(twInvalidArgument, "{} is {}; with rows of {} it must be {} or {}", scales, Value(input.wire_scales),
                dtype_text(wire), TW_CONSTANT(twScalesBlocks), TW_CONSTANT(twScalesTensor));
  }
  if (given && !(input.wire_scale >= quantize::kLeastGiven && input.wire_scale <= quantize::kMostGiven)) {
    return fail(twInvalidArgument, "{} is {}; it must be from 2^-116 to 2^116", scale, double{input.wire_scale});
  }
  if (!given && input.wire_scale != 0.0f) {
    return fail(twInvalidArgument, "{} is {}; with a scale for each block it must be 0", scale,
                double{input.wire_scale});
  }
  return {};
}

// Gives the bytes of a row on its way, and refuses them where there is no room.
Status check_wire_bytes(const twCombineInput_t& input, uint64_t most, uint64_t* bytes) {
  const auto elements = static_cast<uint64_t>(input.elements);
  *bytes = elements * static_cast<uint64_t>(dtype_bytes(input.wire_dtype));
  if (input.wire_dtype != twFloat8e4m3) return {};
  *bytes = fp8_row_bytes(elements, input.wire_scales != twScalesTensor);
  if (*bytes <= most) return {};
  return fail(twInvalidArgument, "{} is {}, which takes rows of {} bytes; {} has room for {}",
              Argument("input.elements"), Value(input.elements), *bytes, Argument("config.combine_room"), most);
}

Status check_named_rows(const twGroup& group, const twCombineInput_t& input, CombineRows* rows) {
  if (input.wire_dtype == twDtypeNone && input.elements == 0) return check_scales(input, rows->wire);
  if (!is_summable(input.wire_dtype) && input.wire_dtype != twFloat8e4m3) {
    return fail(twInvalidArgument, "{} is {}; it must be float32, bfloat16, float16 or float8_e4m3",
                Argument("input.wire_dtype"), dtype_text(input.wire_dtype));
  }
  const twPayload_t type{input.wire_dtype, input.elements};
  const uint64_t most = group.shape().most_combine_bytes();
  TW_RETURN_IF_FAILED(check_type("input.wire_dtype", "input.elements", type, most));
  uint64_t bytes = 0;
  TW_RETURN_IF_FAILED(check_wire_bytes(input, most, &bytes));
  const bool own = same(type, {rows->wire, rows->elements});
  if (!own) {  // before scales are looked at: a refusal is of such rows
    rows->map = rows->map.for_combine(bytes);
    rows->wire = type.dtype;
    rows->elements = type.elements;
  }
  TW_RETURN_IF_FAILED(check_scales(input, type.dtype));
  if (const int32_t domain = group.config.given.domain; domain > 0 && type.dtype == twFloat8e4m3) {
    return fail(twInvalidArgument, "{} is {}; in a group whose {} is {} it must be float32, bfloat16 or float16",
                Argument("input.wire_dtype"), dtype_text(type.dtype), Argument("config.domain"), domain);
  }
  if (own) return {};
  rows->scales = input.wire_scales;
  rows->scale = input.wire_scale;
  uint32_t digest = mix_digest(kDigestSeed, static_cast<uint64_t>(type.dtype));
  digest = mix_digest(digest, static_cast<uint64_t>(type.elements));
  if (rows->scales != twScalesNone) {
    const auto bits = uint64_t{std::bit_cast<uint32_t>(rows->scale)};
    digest = mix_digest(digest, bits << 32 | static_cast<uint32_t>(rows->scales));
  }
  rows->digest = mix_rows(nonzero(digest), rows->digest);
  return {};
}

}  // namespace

Status check_combine_rows(const twGroup& group, const twCombineInput_t& input, CombineRows* rows) {
  add_values(input, rows);  // first: a refusal is of such rows
  TW_RETURN_IF_FAILED(check_named_rows(group, input, rows));
  return check_room(group, *rows);
}

}  // namespace tw::api
