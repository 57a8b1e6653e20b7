// Checks a group's configuration, fills in defaults and derives the Shape and window map from it; packs it, and
// compares the ranks' packed configurations field by field. Errors name field, value and range.
//
// What must be equal on all ranks must be in each_shared_field or in pack_config: a field that is missing there lets
// ranks have different windows (S10) or chunks and packets that the peers do not expect (S4). size_for_device decides
// speed alone, as long as all ranks decide alike.
#include "core/config.h"

#include <algorithm>
#include <bit>

#include "exchange/token_replicas.h"

namespace tw {
namespace {

// Refuses what low latency does not have.
Status check_absent(const Argument& field, int64_t value) {
  if (value == 0) return {};
  return fail(twInvalidArgument, "{} is {}; in low latency it must be 0", field, Value(value));
}

// Gives one row's bytes, and refuses them where they do not fit a signed 64-bit stride.
Status row_bytes(const Argument& field, int64_t elements, twDtype_t dtype, uint64_t* bytes) {
  TW_RETURN_IF_FAILED(check_range(field, elements, 1, INT64_MAX / 16));
  *bytes = static_cast<uint64_t>(elements) * dtype_bytes(dtype);
  return {};
}

Status check_payloads(const twGroupConfig_t& given, Shape* shape) {
  TW_RETURN_IF_FAILED(check_range("config.num_payloads", given.num_payloads, 1, TW_MAX_PAYLOADS));
  for (int q = 0; q < given.num_payloads; ++q) {
    const twPayload_t& payload = given.payloads[q];
    TW_RETURN_IF_FAILED(check_range({"config.payloads[].dtype", q}, payload.dtype, 1, kDtypes - 1));
    TW_RETURN_IF_FAILED(
        row_bytes({"config.payloads[].elements", q}, payload.elements, payload.dtype, &shape->payload_bytes[q]));
  }
  shape->payloads = given.num_payloads;
  for (const auto& [name, room] : {std::pair(Argument("config.dispatch_room"), given.dispatch_room),
                                   {"config.combine_room", given.combine_room}}) {
    TW_RETURN_IF_FAILED(check_range(name, static_cast<int64_t>(room), 0, INT64_MAX / 16));
  }
  shape->dispatch_room = given.dispatch_room;
  shape->combine_room = given.combine_room;
  if (!is_summable(given.combine_dtype)) {
    return fail(twInvalidArgument, "{} is {}; it must be float32, bfloat16 or float16",
                Argument("config.combine_dtype"), dtype_text(given.combine_dtype));
  }
  return row_bytes("config.combine_elements", given.combine_elements, given.combine_dtype, &shape->combine_bytes);
}

void place_contiguously(int32_t experts, int32_t ranks, GroupConfig* config) {
  const int32_t each = experts / ranks;
  const int32_t more = experts % ranks;  // this many ranks hold one more
  for (int32_t rank = 0; rank < ranks; ++rank) {
    for (int32_t slot = 0; slot < each + (rank < more ? 1 : 0); ++slot) {
      config->expert_rank.push_back(rank);
      config->expert_slot.push_back(slot);
    }
  }
}

Status place_as_given(const twGroupConfig_t& given, int32_t experts, int32_t ranks, GroupConfig* config) {
  if (given.expert_rank == nullptr || given.expert_slot == nullptr) {
    return fail(twInvalidArgument, "{} and {} must be given together", Argument("config.expert_rank[]"),
                Argument("config.expert_slot[]"));
  }
  config->expert_rank.assign(given.expert_rank, given.expert_rank + experts);
  config->expert_slot.assign(given.expert_slot, given.expert_slot + experts);
  std::vector<int32_t> held(ranks, 0);
  for (int32_t e = 0; e < experts; ++e) {
    TW_RETURN_IF_FAILED(check_range({"config.expert_rank[]", e}, config->expert_rank[e], 0, ranks - 1));
    ++held[config->expert_rank[e]];
  }
  std::vector<int32_t> begin(ranks, 0);  // where each rank's slots begin in `taken`
  for (int32_t rank = 1; rank < ranks; ++rank) begin[rank] = begin[rank - 1] + held[rank - 1];
  std::vector<int32_t> taken(experts, -1);
  for (int32_t e = 0; e < experts; ++e) {
    const int32_t rank = config->expert_rank[e];
    const int32_t slot = config->expert_slot[e];
    if (slot < 0 || slot >= held[rank]) {
      return fail(twInvalidArgument, "{} is {}; rank {} holds {} experts, so it must be from {} to {}",
                  Argument("config.expert_slot[]", e), Value(slot), rank, held[rank], Least(0), Most(held[rank] - 1));
    }
    int32_t& owner = taken[begin[rank] + slot];
    if (owner >= 0) {
      return fail(twInvalidArgument, "{} is {}, which expert {} has already on rank {}",
                  Argument("config.expert_slot[]", e), Value(slot), owner, rank);
    }
    owner = e;
  }
  return {};
}

Status check_ids(const twGroupConfig_t& given, const GroupConfig& config) {
  if (given.id_dtype != twInt32 && given.id_dtype != twInt64) {
    return fail(twInvalidArgument, "{} is {}; it must be int32 or int64", Argument("config.id_dtype"),
                dtype_text(given.id_dtype));
  }
  TW_RETURN_IF_FAILED(check_range("config.id_space", given.id_space, twIdLocal, twIdGlobal));
  const int32_t ids = given.id_space == twIdGlobal
                          ? config.placement.slots
                          : *std::max_element(config.local_experts.begin(), config.local_experts.end());
  if (given.invalid_id >= 0 && given.invalid_id < ids) {
    return fail(twInvalidArgument, "{} is {}, which is a valid id; it must be negative or at least {}",
                Argument("config.invalid_id"), Value(given.invalid_id), ids);
  }
  return {};
}

// The bound up to which a group of both modes has low latency, unless it says so itself. With a new routing low latency
// is faster at all sizes, but beyond this by a few per cent alone: 0.86 of high throughput's time at 512 tokens, 0.96
// at 1024 and 0.98 at 2048, on 4x H100 (bench/results/auto-4-gpus.json), and slots take memory.
constexpr int32_t kLowLatencyTokens = 1024;

// Checks the field that a group of both modes alone has, and fills in its default. A combine of low latency has one
// part.
Status check_low_latency(twGroupConfig_t* given, Shape* shape) {
  constexpr Argument kField("config.low_latency_tokens");
  if (given->mode != twAutomatic) {
    if (given->low_latency_tokens == 0) return {};
    return fail(twInvalidArgument, "{} is {}; only {} has it, elsewhere it must be 0", kField,
                Value(given->low_latency_tokens), TW_CONSTANT(twAutomatic));
  }
  const int32_t most = given->inbox_tokens > 0 ? given->inbox_tokens : given->max_tokens;
  if (given->low_latency_tokens == 0) given->low_latency_tokens = std::min(kLowLatencyTokens, most);
  TW_RETURN_IF_FAILED(check_range(kField, given->low_latency_tokens, 1, most));
  shape->low_latency_tokens = given->low_latency_tokens;
  return {};
}

// Checks the fields that low latency does not have, and fills in their defaults.
Status check_throughput(int32_t ranks, const GroupConfig& config, twGroupConfig_t* given, Shape* shape) {
  if (given->row_alignment == 0) given->row_alignment = 1;
  if (given->lease_bytes > static_cast<uint64_t>(INT64_MAX / 2)) {
    return fail(twInvalidArgument, "{} is {}; it must be from {} to {}", Argument("config.lease_bytes"),
                Value(given->lease_bytes), Least(0), Most(INT64_MAX / 2));
  }
  if (given->mode == twLowLatency) {
    TW_RETURN_IF_FAILED(check_absent("config.lease_bytes", static_cast<int64_t>(given->lease_bytes)));
    TW_RETURN_IF_FAILED(check_absent("config.max_recv_tokens", given->max_recv_tokens));
    TW_RETURN_IF_FAILED(check_absent("config.overflow", given->overflow));
    TW_RETURN_IF_FAILED(check_absent("config.inbox_tokens", given->inbox_tokens));
    TW_RETURN_IF_FAILED(check_low_latency(given, shape));
    return check_row_alignment("config.row_alignment", given->row_alignment);
  }
  const int32_t most = ranks * given->max_tokens;
  if (given->max_recv_tokens == 0) given->max_recv_tokens = most;
  TW_RETURN_IF_FAILED(check_range("config.max_recv_tokens", given->max_recv_tokens, 1, most));
  TW_RETURN_IF_FAILED(check_range("config.overflow", given->overflow, twOverflowRefuse, twOverflowDrop));
  if (given->inbox_tokens != 0) {
    const int32_t least = (given->max_tokens + kMaxParts - 1) / kMaxParts;
    TW_RETURN_IF_FAILED(check_range("config.inbox_tokens", given->inbox_tokens, least, given->max_tokens));
  }
  TW_RETURN_IF_FAILED(check_low_latency(given, shape));
  TW_RETURN_IF_FAILED(check_row_alignment("config.row_alignment", given->row_alignment));
  shape->recv_rows = given->max_recv_tokens;
  shape->lease_bytes = (given->lease_bytes + kPageAlignment - 1) / kPageAlignment * kPageAlignment;
  shape->most_local_experts = *std::max_element(config.local_experts.begin(), config.local_experts.end());
  return {};
}

// Decides how many tokens' partials an inbox has room for. By default so many that it is no larger than the rows that
// come, whose bank it shares; but a second part costs a combine 22 to 28 us, 1.5 % of a pair of 8192 tokens on 4x
// H100 (bench/results/combine-parts.json), so only where that saves enough, and in at most kMostParts parts.
void size_inbox(const twGroupConfig_t& given, Shape* shape) {
  constexpr uint64_t kWorth = 512u << 20;  // bytes of a window
  constexpr uint64_t kMostParts = 4;
  if (!shape->exact() || shape->staged != 0) return;
  shape->inbox_tokens = given.inbox_tokens;
  if (given.inbox_tokens > 0) return;
  const uint64_t of_token = static_cast<uint64_t>(shape->returning()) * shape->most_combine_bytes();
  const uint64_t inbox = of_token * static_cast<uint64_t>(shape->max_tokens);
  const uint64_t rows =
      static_cast<uint64_t>(shape->recv_rows) * (shape->most_dispatch_bytes() + meta_bytes(shape->top_k));
  const uint64_t parts = std::min(kMostParts, (inbox + rows - 1) / rows);
  if (parts < 2) return;
  const uint64_t tokens = std::max((static_cast<uint64_t>(shape->max_tokens) + parts - 1) / parts,
                                   static_cast<uint64_t>(shape->low_latency_tokens));
  const uint64_t saved = 2 * (inbox - std::max(rows, tokens * of_token)) * static_cast<uint64_t>(shape->channels);
  if (saved >= kWorth) shape->inbox_tokens = static_cast<int32_t>(tokens);
}

// Checks how many ranks hold the same tokens, and fills in the default.
Status check_token_replicas(int32_t ranks, twGroupConfig_t* given) {
  constexpr Argument kField("config.token_replicas");
  if (given->token_replicas == 0) given->token_replicas = 1;
  TW_RETURN_IF_FAILED(check_range(kField, given->token_replicas, 1, ranks));
  if (ranks % given->token_replicas == 0) return {};
  return fail(twInvalidArgument, "{} is {}; it must divide the number of ranks, {}", kField,
              Value(given->token_replicas), ranks);
}

// Checks how many ranks' partials are folded. More ranks than there are is no error: survivors keep the settings of a
// larger group.
Status check_domain(const twGroupConfig_t& given) {
  constexpr Argument kField("config.domain");
  TW_RETURN_IF_FAILED(check_range(kField, given.domain, 0, TW_MAX_RANKS));
  if (given.domain == 0 || given.combine_rows == twRowPerRank) return {};
  return fail(twInvalidArgument, "{} is {}; with {} of {} it must be 0, as there rows return and no partials", kField,
              Value(given.domain), Argument("config.combine_rows"), TW_CONSTANT(twRowPerExpert));
}

// What a bank must have room for so that a set shares its sums, whatever rows a call has: what is a byte on the wire
// may be a float32 in the output.
uint64_t sharing_bytes(const twGroupConfig_t& given, const Shape& shape) {
  if (given.token_replicas == 1) return 0;
  const uint64_t most = std::min<uint64_t>(shape.most_combine_bytes(), UINT64_MAX / 64);
  const int32_t blocks = shape.staged != 0 ? shape.ranks : given.token_replicas;
  return sharing_places(blocks, shape.max_tokens, most, shape.top_k, true).bytes;
}

// Kernels count the pieces of a batch of rows in 32 bits.
Status check_device_rows(const Shape& shape) {
  constexpr uint64_t kLargest = 16u << 20;
  for (int q = 0; q < shape.payloads; ++q) {
    if (shape.payload_bytes[q] <= kLargest) continue;
    return fail(twInvalidArgument, "{} has rows of {}; on a device they may have {}", Argument("config.payloads[]", q),
                bytes_text(shape.payload_bytes[q]), bytes_text(kLargest));
  }
  if (shape.combine_bytes > kLargest) {
    return fail(twInvalidArgument, "{} gives rows of {}; on a device they may have {}",
                Argument("config.combine_elements"), bytes_text(shape.combine_bytes), bytes_text(kLargest));
  }
  for (const auto& [name, room] : {std::pair(Argument("config.dispatch_room"), shape.dispatch_room),
                                   {"config.combine_room", shape.combine_room}}) {
    if (room <= kLargest) continue;
    return fail(twInvalidArgument, "{} is {}; on a device rows may have {}", name, Value(room), bytes_text(kLargest));
  }
  return {};
}

// Decides how a combine's rows are chunked, and how many tokens may travel as LL128 packets.
void size_for_device(const Environment& environment, Shape* shape) {
  shape->chunk_rows = chunk_rows_of(shape->combine_bytes);
  // Packets win while they save a fence and a round trip. Their flag in 128 bytes, and the copy out of them, cost more
  // than that from about 1500 tokens for one peer on, or 512 where counts are exchanged first. With more peers each
  // gets its share of that; with many peers it gets half, as a window has room for the packets of all of them in both
  // banks.
  const auto tokens = [&](bool exact) {
    const bool longest = !exact && shape->ranks <= 8;
    const int32_t usual = std::clamp((longest ? 2048 : 1024) / shape->ranks, 8, longest ? 1024 : 512);
    return environment.packet_tokens >= 0 ? environment.packet_tokens : usual;
  };
  shape->packet_tokens = std::min(tokens(shape->exact()), shape->max_tokens);
  shape->low_latency_packets = std::min(tokens(false), shape->low_latency_tokens);
}

constexpr char kBits[] = " (bits)";  // how the numbers of a sentence show floats

// Visits every scalar field that must be equal on all ranks: its name, its value and, if that is not the number itself,
// how it is shown.
template <class Visit>
void each_shared_field(const GroupConfig& config, Visit&& visit) {
  const twGroupConfig_t& given = config.given;
  const PlacementSpec& placement = config.placement;
  // First, as lanes follow from it.
  visit("config.arena", static_cast<int64_t>(config.arena >> 16), " (the call of the comm that made it; 0: none)");
  visit("config.mode", given.mode);
  visit("config.num_experts", given.num_experts);
  visit("config.top_k", given.top_k);
  visit("config.max_tokens", given.max_tokens);
  visit("config.num_payloads", given.num_payloads);
  for (int q = 0; q < TW_MAX_PAYLOADS; ++q) {
    const bool used = q < given.num_payloads;
    visit({"config.payloads[].dtype", q}, used ? given.payloads[q].dtype : 0);
    visit({"config.payloads[].elements", q}, used ? given.payloads[q].elements : 0);
  }
  visit("config.combine_dtype", given.combine_dtype);
  visit("config.combine_elements", given.combine_elements);
  visit("config.lanes", given.lanes);
  visit("config.timeout_ms", given.timeout_ms);
  visit("config.id_dtype", given.id_dtype);
  visit("config.id_space", given.id_space);
  visit("config.invalid_id", given.invalid_id);
  visit("config.max_recv_tokens", given.max_recv_tokens);
  visit("config.overflow", given.overflow);
  visit("config.row_alignment", given.row_alignment);
  visit("config.lease_bytes", static_cast<int64_t>(given.lease_bytes));
  visit("config.dispatch_room", static_cast<int64_t>(given.dispatch_room));
  visit("config.combine_room", static_cast<int64_t>(given.combine_room));
  visit("config.inbox_tokens", given.inbox_tokens);
  visit("config.low_latency_tokens", given.low_latency_tokens);
  visit("config.combine_rows", given.combine_rows);
  visit("config.token_replicas", given.token_replicas);
  visit("config.domain", given.domain);
  visit("config.placement", placement.given);
  visit("config.placement->num_layers", placement.layers);
  visit("config.placement->num_slots", placement.slots);
  visit("config.placement->policy", placement.policy);
  visit("config.placement->count_loads", placement.counts_loads);
  visit("config.placement->load_decay", std::bit_cast<int32_t>(placement.decay), kBits);
  visit("config.placement->moves", placement.moves);
  visit("config.placement->weight_bytes", static_cast<int64_t>(placement.weight_bytes));
  visit("config.arena", static_cast<int64_t>(config.loads), " (the place of load statistics there)");
  visit("TOKENWAY_FIRST_STEP", config.first_step);
  visit("TOKENWAY_LINE_TOKENS", config.shape().packet_tokens);
  visit("TOKENWAY_LINE_TOKENS", config.shape().low_latency_packets);
  visit("config.room_for", static_cast<int64_t>(config.room.bank), " (bytes of a bank)");
  visit("config.room_for", static_cast<int64_t>(config.room.chunk_signals), " (bytes of a bank's chunk signals)");
  visit("config.room_for", static_cast<int64_t>(config.room.packets), " (bytes of a bank's LL128 packets)");
  visit("config.room_for", static_cast<int64_t>(config.room.loads), " (bytes of load statistics)");
}

// Makes a lane's room large enough for the groups that shall be placed in this window: one at a time uses a bank, but
// all keep their load statistics.
Status make_room_for(const twGroupConfig_t& given, const GroupConfig& own, const Environment& environment, bool staged,
                     Room* least) {
  uint64_t loads = WindowMap::loads_bytes(own.shape());
  for (int32_t i = 0; i < given.num_room_for; ++i) {
    GroupConfig other;
    twGroupConfig_t alike = *given.room_for[i];
    alike.lanes = own.shape().channels;  // how large an inbox is by default follows from them
    alike.lease_bytes = 0;
    const Status checked = check_config(alike, own.shape().ranks, own.on_device, environment, &other, staged);
    if (!checked.ok()) return fail(checked.code, "{}: {}", Argument("config.room_for[]", i), checked.sentence);
    least->bank = std::max(least->bank, other.room.bank);
    least->unpacked = std::max(least->unpacked, other.room.unpacked);
    least->chunk_signals = std::max(least->chunk_signals, other.room.chunk_signals);
    least->packets = std::max(least->packets, other.room.packets);
    loads += WindowMap::loads_bytes(other.shape());
  }
  least->loads = std::max(least->loads, loads);
  return {};
}

}  // namespace

Status check_config(const twGroupConfig_t& caller, int32_t ranks, bool on_device, const Environment& environment,
                    GroupConfig* config, bool staged, const Room& least) {
  config->given = caller;
  config->on_device = on_device;
  config->first_step = environment.first_step;
  twGroupConfig_t& given = config->given;
  if (given.lanes == 0) given.lanes = 1;
  if (given.timeout_ms == 0) given.timeout_ms = environment.timeout_ms;
  if (given.id_dtype == twDtypeNone) given.id_dtype = twInt32;
  if (given.num_experts == 0 && given.top_k == 0) given.num_experts = ranks, given.top_k = 1;

  TW_RETURN_IF_FAILED(check_range("config.mode", given.mode, twLowLatency, twAutomatic));
  TW_RETURN_IF_FAILED(check_range("config.num_experts", given.num_experts, 1, TW_MAX_EXPERTS));
  TW_RETURN_IF_FAILED(check_range("config.top_k", given.top_k, 1, std::min(TW_MAX_TOP_K, given.num_experts)));
  TW_RETURN_IF_FAILED(check_range("config.max_tokens", given.max_tokens, 1, TW_MAX_TOKENS));
  TW_RETURN_IF_FAILED(check_range("config.lanes", given.lanes, 1, TW_MAX_LANES));
  TW_RETURN_IF_FAILED(check_range("config.timeout_ms", given.timeout_ms, 1, INT32_MAX));
  TW_RETURN_IF_FAILED(check_range("config.sm_limit", given.sm_limit, 0, INT32_MAX));
  if ((given.alloc == nullptr) != (given.release == nullptr)) {
    return fail(twInvalidArgument, "{} and {} must be given together", Argument("config.alloc"),
                Argument("config.release"));
  }
  if (static_cast<int64_t>(ranks) * given.max_tokens > INT32_MAX) {
    return fail(twInvalidArgument,
                "{} is {}; for {} ranks it must be from {} to {}: received rows are counted in 32 bits",
                Argument("config.max_tokens"), Value(given.max_tokens), ranks, Least(1), Most(INT32_MAX / ranks));
  }
  TW_RETURN_IF_FAILED(check_token_replicas(ranks, &given));
  Shape shape;
  shape.ranks = ranks;
  TW_RETURN_IF_FAILED(check_placement(given.placement, given.num_experts, &config->placement));
  shape.experts = config->placement.slots;
  shape.logical_experts = config->placement.given ? given.num_experts : 0;
  shape.counts_loads = config->placement.counts_loads ? 1 : 0;
  shape.moves = config->placement.moves ? 1 : 0;
  shape.weight_bytes = config->placement.weight_bytes;
  shape.top_k = given.top_k;
  TW_RETURN_IF_FAILED(check_range("config.combine_rows", given.combine_rows, twRowPerRank, twRowPerExpert));
  shape.per_expert = given.combine_rows == twRowPerExpert ? 1 : 0;
  if (shape.per_expert != 0 && given.token_replicas > 1) {
    return fail(twInvalidArgument, "{} is {}; with {} of {} it must be 1", Argument("config.token_replicas"),
                Value(given.token_replicas), Argument("config.combine_rows"), TW_CONSTANT(twRowPerExpert));
  }
  TW_RETURN_IF_FAILED(check_domain(given));
  shape.max_tokens = given.max_tokens;
  shape.channels = given.lanes;
  TW_RETURN_IF_FAILED(check_payloads(given, &shape));
  if (given.expert_rank == nullptr && given.expert_slot == nullptr) {
    place_contiguously(shape.experts, ranks, config);
  } else {
    TW_RETURN_IF_FAILED(place_as_given(given, shape.experts, ranks, config));
  }
  config->local_experts.assign(ranks, 0);
  for (const int32_t rank : config->expert_rank) ++config->local_experts[rank];
  TW_RETURN_IF_FAILED(check_throughput(ranks, *config, &given, &shape));
  TW_RETURN_IF_FAILED(check_ids(given, *config));
  if (on_device) {
    TW_RETURN_IF_FAILED(check_device_rows(shape));
    size_for_device(environment, &shape);
    shape.staged = staged ? 1 : 0;
    if (staged && shape.leases()) {
      return fail(twUnsupported, "{} is {}; rows that travel in blocks between CUDA devices land in the window: give 0",
                  Argument("config.lease_bytes"), Value(given.lease_bytes));
    }
    if (staged) shape.packet_tokens = shape.low_latency_packets = 0;  // rows that travel in blocks all come at once
  }
  size_inbox(given, &shape);
  bool fits = WindowMap::make(shape, &config->map);
  Room room = least;
  room.bank = std::max(room.bank, sharing_bytes(given, shape));
  fits = fits && room.bank < UINT64_MAX / 2;
  if (fits) TW_RETURN_IF_FAILED(make_room_for(given, *config, environment, staged, &room));
  fits = fits && WindowMap::make(shape, &config->map, room);
  config->room = config->map.room();
  given.num_room_for = 0;  // room has what they need
  if (!fits) {
    return fail(twInvalidArgument,
                "config: {} lanes of 2 banks for {} ranks x max_tokens {} with these rows pass 64 bits; lower "
                "max_tokens, lanes or the row sizes",
                given.lanes, ranks, given.max_tokens);
  }
  return {};
}

Status check_row_alignment(const Argument& name, int32_t alignment) {
  TW_RETURN_IF_FAILED(check_range(name, alignment, 1, 256));
  if ((alignment & (alignment - 1)) == 0) return {};
  return fail(twInvalidArgument, "{} is {}; it must be a power of two from 1 to 256", name, Value(alignment));
}

std::string pack_config(const GroupConfig& config) {
  Packer packer;
  each_shared_field(config, [&](const Argument&, int64_t value, const char* = "") { packer.add<int64_t>(value); });
  packer.add_bytes(config.expert_rank.data(), config.expert_rank.size() * sizeof(int32_t));
  packer.add_bytes(config.expert_slot.data(), config.expert_slot.size() * sizeof(int32_t));
  packer.add_bytes(config.placement.slot_expert.data(), config.placement.slot_expert.size() * sizeof(int32_t));
  packer.add_bytes(config.placement.slot_shares.data(), config.placement.slot_shares.size() * sizeof(float));
  return packer.take();
}

Status compare_configs(const std::vector<Parcel>& parcels) {
  for (size_t rank = 1; rank < parcels.size(); ++rank) {
    Unpacker first(parcels[0].bytes);
    Unpacker other(parcels[rank].bytes);
    Status difference;
    each_shared_field(GroupConfig{}, [&](const Argument& name, int64_t, const char* as = "") {
      const int64_t a = first.get<int64_t>();
      const int64_t b = other.get<int64_t>();
      if (a == b || !difference.ok()) return;
      difference = fail(twConfigMismatch, "{}{} differs: rank 0 has {}, rank {} has {}", name, as, a, rank, b);
    });
    for (const auto& [path, as] : {std::pair("config.expert_rank[]", ""),
                                   {"config.expert_slot[]", ""},
                                   {"config.placement->slot_expert[]", ""},
                                   {"config.placement->slot_shares[]", kBits}}) {
      const std::string a = first.get_bytes();
      const std::string b = other.get_bytes();
      const size_t size = std::min(a.size(), b.size()) / sizeof(int32_t);
      if (a.size() != b.size() && difference.ok()) {
        difference = fail(twConfigMismatch, "{} differs: rank 0 has {} values, rank {} has {}", Argument(path),
                          a.size() / sizeof(int32_t), rank, b.size() / sizeof(int32_t));
      }
      for (size_t e = 0; e < size && difference.ok(); ++e) {
        int32_t x = 0;
        int32_t y = 0;
        a.copy(reinterpret_cast<char*>(&x), sizeof x, e * sizeof x);
        b.copy(reinterpret_cast<char*>(&y), sizeof y, e * sizeof y);
        if (x == y) continue;
        difference = fail(twConfigMismatch, "{}{} differs: rank 0 has {}, rank {} has {}",
                          Argument(path, static_cast<int64_t>(e)), as, x, rank, y);
      }
    }
    TW_RETURN_IF_FAILED(difference);
    if (!first.ok() || !other.ok()) return fail(twConfigMismatch, "config of rank {} cannot be read", rank);
  }
  return {};
}

twWindowBytes_t window_bytes(const GroupConfig& config) {
  const Shape& shape = config.shape();
  twWindowBytes_t bytes{};
  bytes.size = sizeof bytes;
  bytes.window = config.map.bytes();
  bytes.per_lane = config.map.channel_bytes();
  bytes.dispatch_row = meta_bytes(shape.top_k);
  for (int q = 0; q < shape.payloads; ++q) bytes.dispatch_row += shape.payload_bytes[q];
  bytes.combine_row = shape.combine_bytes;
  // A row of the designs that this is compared with: the payloads, without our header and routing.
  const uint64_t places = 2ull * static_cast<uint64_t>(shape.choices()) * static_cast<uint64_t>(shape.max_tokens);
  if (__builtin_mul_overflow(places, bytes.dispatch_row - meta_bytes(shape.top_k), &bytes.expert_buffers)) {
    bytes.expert_buffers = UINT64_MAX;
  }
  return bytes;
}

}  // namespace tw
