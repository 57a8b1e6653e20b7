// The entry points of tokenway/balance.h: they check a configuration, loads and maps, and call src/balance layer by
// layer. Errors name the field, or the layer and expert. Loads become doubles here, in one order: the plan must be the
// same on every machine.
#include <algorithm>
#include <cmath>
#include <vector>

#include "api/check.h"
#include "api/enter.h"
#include "api/matrix.h"
#include "balance/plan.h"
#include "core/config.h"

namespace {

using tw::Argument;
using tw::check_range;
using tw::fail;
using tw::Status;
using tw::Value;
using tw::api::shape_text;
using tw::balance::Request;
using tw::balance::Shape;

constexpr double kParts = 1e6;

Status check_shape(const twPlanConfig_t& config, Shape* shape) {
  TW_RETURN_IF_FAILED(check_range("config.num_layers", config.num_layers, 0, INT32_MAX));
  TW_RETURN_IF_FAILED(check_range("config.num_experts", config.num_experts, 1, TW_MAX_EXPERTS));
  TW_RETURN_IF_FAILED(check_range("config.num_ranks", config.num_ranks, 1, TW_MAX_RANKS));
  const int32_t ranks = config.num_ranks, experts = config.num_experts;
  TW_RETURN_IF_FAILED(check_range("config.slots_per_rank", config.slots_per_rank, (experts + ranks - 1) / ranks,
                                  TW_MAX_EXPERTS / ranks));
  TW_RETURN_IF_FAILED(check_range("config.num_nodes", config.num_nodes, 1, ranks));
  if (ranks % config.num_nodes != 0) {
    return fail(twInvalidArgument, "{} is {}; it must divide {}, {}", Argument("config.num_nodes"),
                Value(config.num_nodes), Argument("config.num_ranks"), ranks);
  }
  *shape = {experts, ranks, config.slots_per_rank, config.num_nodes, 0};
  return {};
}

Status check_groups(const twPlanConfig_t& config, Shape* shape, int64_t* tolerance) {
  TW_RETURN_IF_FAILED(check_range("config.num_groups", config.num_groups, 0, config.num_experts));
  if (config.num_groups > 0 &&
      (config.num_groups % config.num_nodes != 0 || config.num_experts % config.num_groups != 0)) {
    return fail(twInvalidArgument, "{} is {}; it must be 0, or a multiple of {}, {}, that divides {}, {}",
                Argument("config.num_groups"), Value(config.num_groups), Argument("config.num_nodes"), config.num_nodes,
                Argument("config.num_experts"), config.num_experts);
  }
  // Written so that NaN is refused too.
  if (!(config.node_tolerance >= 0)) {
    return fail(twInvalidArgument, "{} is {}; it must be at least 0", Argument("config.node_tolerance"),
                config.node_tolerance);
  }
  // Nodes matter where there are several and a rank does not hold everything anyway.
  const bool grouped = config.num_groups > 0 && config.num_nodes > 1 && config.slots_per_rank < config.num_experts;
  shape->groups = grouped ? config.num_groups : 0;
  // 1 stands for a node that carries all there is.
  *tolerance = static_cast<int64_t>((config.node_tolerance >= 1 ? config.num_nodes : config.node_tolerance) * kParts);
  return {};
}

Status check_map(const char* path, const Shape& shape, int32_t layers, const int32_t* map) {
  if (layers == 0) return {};
  if (map == nullptr) return fail(twInvalidArgument, "{} is NULL", Argument(path));
  std::vector<char> seen(shape.experts);
  for (int32_t layer = 0; layer < layers; ++layer) {
    std::fill(seen.begin(), seen.end(), 0);
    const int32_t* const row = map + static_cast<int64_t>(layer) * shape.places();
    for (int32_t slot = 0; slot < shape.places(); ++slot) {
      TW_RETURN_IF_FAILED(check_range({path, layer, slot}, row[slot], 0, shape.experts - 1));
      seen[row[slot]] = 1;
    }
    const auto missing = std::find(seen.begin(), seen.end(), 0);
    if (missing == seen.end()) continue;
    return fail(twInvalidArgument, "{} has no slot for expert {}; every expert needs one", Argument(path, layer),
                missing - seen.begin());
  }
  return {};
}

template <class Number>
Status read_numbers(const twTensor_t& tensor, double* loads) {
  const auto* const data = static_cast<const Number*>(tensor.data);
  for (int64_t layer = 0; layer < tensor.shape[0]; ++layer) {
    double total = 0;
    for (int64_t e = 0; e < tensor.shape[1]; ++e) {
      const auto load = static_cast<double>(data[layer * tensor.stride[0] + e * tensor.stride[1]]);
      if (!std::isfinite(load) || load < 0) {
        return fail(twInvalidArgument, "{} is {}; a load must be finite and at least 0", Argument("loads[]", layer, e),
                    load);
      }
      total += load;
      *loads++ = load;
    }
    if (!std::isfinite(total)) {
      return fail(twInvalidArgument, "{} add up to more than a double holds; give smaller units",
                  Argument("loads[]", layer));
    }
  }
  return {};
}

// Reads loads, [layers, E], as doubles.
Status read_loads(const twTensor_t* tensor, const Shape& shape, int32_t layers, std::vector<double>* loads) {
  TW_RETURN_IF_FAILED(tw::api::check_matrix("loads", tensor, "[num_layers, num_experts]"));
  if (tensor->shape[0] != layers || tensor->shape[1] != shape.experts) {
    return fail(twInvalidArgument, "{} has shape {}; it must be {}", Argument("loads"),
                shape_text({tensor->shape[0], tensor->shape[1]}), shape_text({layers, shape.experts}));
  }
  const auto allowed = {twFloat32, twFloat64, twInt32, twInt64};
  if (std::find(allowed.begin(), allowed.end(), tensor->dtype) == allowed.end()) {
    return fail(twInvalidArgument, "{} has dtype {}; it must be float32, float64, int32 or int64", Argument("loads"),
                tw::dtype_text(tensor->dtype));
  }
  TW_RETURN_IF_FAILED(tw::api::check_memory("loads", *tensor));
  loads->resize(static_cast<size_t>(layers) * shape.experts);
  switch (tensor->dtype) {
    case twFloat32:
      return read_numbers<float>(*tensor, loads->data());
    case twFloat64:
      return read_numbers<double>(*tensor, loads->data());
    case twInt32:
      return read_numbers<int32_t>(*tensor, loads->data());
    default:
      return read_numbers<int64_t>(*tensor, loads->data());
  }
}

void count_replicas(const Shape& shape, const int32_t* map, int32_t* replicas) {
  std::fill(replicas, replicas + shape.experts, 0);
  for (int32_t slot = 0; slot < shape.places(); ++slot) ++replicas[map[slot]];
}

Status plan(const twPlanConfig_t* given, const twTensor_t* tensor, const twPlanOutput_t* given_output) {
  twPlanConfig_t config = TW_PLAN_CONFIG_INIT;
  twPlanOutput_t output = TW_PLAN_OUTPUT_INIT;
  TW_RETURN_IF_FAILED(tw::api::read_struct("config", given, &config));
  TW_RETURN_IF_FAILED(tw::api::read_struct("output", given_output, &output));
  Request request{};
  Shape& shape = request.shape;
  TW_RETURN_IF_FAILED(check_shape(config, &shape));
  TW_RETURN_IF_FAILED(check_groups(config, &shape, &request.tolerance));
  TW_RETURN_IF_FAILED(check_range("max_writes", config.max_writes, -1, INT32_MAX));
  request.layers = config.num_layers;
  request.old = config.old_map;
  request.budget = config.max_writes < 0 ? std::max(4, shape.ranks / 2) : config.max_writes;
  std::vector<double> loads;
  TW_RETURN_IF_FAILED(read_loads(tensor, shape, config.num_layers, &loads));
  if (request.old != nullptr) TW_RETURN_IF_FAILED(check_map("config.old_map[]", shape, config.num_layers, request.old));
  if (output.physical_to_logical == nullptr && config.num_layers > 0) {
    return fail(twInvalidArgument, "{} is NULL", Argument("output.physical_to_logical"));
  }
  std::vector<double> rank_loads(shape.ranks);
  for (int64_t layer = 0; layer < config.num_layers; ++layer) {
    int32_t* const map = output.physical_to_logical + layer * shape.places();
    tw::balance::Result result{map, rank_loads.data(), 0, 0};
    tw::balance::plan_layer(request, static_cast<int32_t>(layer), loads.data() + layer * shape.experts, &result);
    if (output.replicas != nullptr) count_replicas(shape, map, output.replicas + layer * shape.experts);
    if (output.rank_loads != nullptr) {
      std::copy(rank_loads.begin(), rank_loads.end(), output.rank_loads + layer * shape.ranks);
    }
    if (output.bounds != nullptr) output.bounds[layer] = result.bound;
    if (output.stray != nullptr) output.stray[layer] = result.stray;
  }
  return {};
}

// Reads what the calls about maps share: a configuration's shape.
Status read_shape(const twPlanConfig_t* given, twPlanConfig_t* config, Shape* shape) {
  TW_RETURN_IF_FAILED(tw::api::read_struct("config", given, config));
  return check_shape(*config, shape);
}

Status plan_loads(const twPlanConfig_t* given, const twTensor_t* tensor, const int32_t* map, double* rank_loads) {
  twPlanConfig_t config = TW_PLAN_CONFIG_INIT;
  Shape shape{};
  std::vector<double> loads;
  TW_RETURN_IF_FAILED(read_shape(given, &config, &shape));
  TW_RETURN_IF_FAILED(read_loads(tensor, shape, config.num_layers, &loads));
  TW_RETURN_IF_FAILED(check_map("map[]", shape, config.num_layers, map));
  if (rank_loads == nullptr && config.num_layers > 0) {
    return fail(twInvalidArgument, "{} is NULL", Argument("rank_loads"));
  }
  std::vector<int32_t> replicas(shape.experts);
  for (int64_t layer = 0; layer < config.num_layers; ++layer) {
    const int32_t* const row = map + layer * shape.places();
    count_replicas(shape, row, replicas.data());
    tw::balance::add_up(shape, row, replicas.data(), loads.data() + layer * shape.experts,
                        rank_loads + layer * shape.ranks);
  }
  return {};
}

Status plan_slots(const twPlanConfig_t* given, const int32_t* map, int32_t* replicas, int32_t* slots, int32_t width) {
  twPlanConfig_t config = TW_PLAN_CONFIG_INIT;
  Shape shape{};
  TW_RETURN_IF_FAILED(read_shape(given, &config, &shape));
  TW_RETURN_IF_FAILED(check_map("map[]", shape, config.num_layers, map));
  std::vector<int32_t> counts(shape.experts);
  for (int64_t layer = 0; layer < config.num_layers; ++layer) {
    const int32_t* const row = map + layer * shape.places();
    count_replicas(shape, row, counts.data());
    if (replicas != nullptr) std::copy(counts.begin(), counts.end(), replicas + layer * shape.experts);
    if (slots == nullptr) continue;
    const auto most = std::max_element(counts.begin(), counts.end());
    if (width < *most) {
      return fail(twInvalidArgument, "{} is {}; expert {} of layer {} has {} slots", Argument("width"), Value(width),
                  most - counts.begin(), layer, *most);
    }
    int32_t* const lists = slots + layer * shape.experts * width;
    std::fill(lists, lists + static_cast<int64_t>(shape.experts) * width, -1);
    std::fill(counts.begin(), counts.end(), 0);
    for (int32_t slot = 0; slot < shape.places(); ++slot) {
      lists[static_cast<int64_t>(row[slot]) * width + counts[row[slot]]++] = slot;
    }
  }
  return {};
}

Status plan_moves(const twPlanConfig_t* given, const int32_t* old_map, const int32_t* new_map, twPlanMove_t* moves,
                  int64_t room, int64_t* count) {
  twPlanConfig_t config = TW_PLAN_CONFIG_INIT;
  Shape shape{};
  TW_RETURN_IF_FAILED(read_shape(given, &config, &shape));
  TW_RETURN_IF_FAILED(check_map("old_map[]", shape, config.num_layers, old_map));
  TW_RETURN_IF_FAILED(check_map("new_map[]", shape, config.num_layers, new_map));
  if (count == nullptr) return fail(twInvalidArgument, "{} is NULL", Argument("count"));
  if (room < 0 || (moves == nullptr && room > 0)) {
    return fail(twInvalidArgument, "{} is {} and {} is {}; NULL has room 0", Argument("room"), Value(room),
                Argument("moves"), moves == nullptr ? "NULL" : "given");
  }
  int64_t written = 0;
  for (int32_t layer = 0; layer < config.num_layers; ++layer) {
    const int64_t first = static_cast<int64_t>(layer) * shape.places();
    for (const auto& move : tw::balance::moves_between(shape, old_map + first, new_map + first)) {
      if (written < room) moves[written] = {layer, move.slot, move.expert, move.before, move.source};
      ++written;
    }
  }
  *count = written;
  return {};
}

}  // namespace

twResult_t twPlan(const twPlanConfig_t* config, const twTensor_t* loads, const twPlanOutput_t* output) {
  return tw::api::enter([&] { return plan(config, loads, output); });
}

twResult_t twPlanLoads(const twPlanConfig_t* config, const twTensor_t* loads, const int32_t* map, double* rank_loads) {
  return tw::api::enter([&] { return plan_loads(config, loads, map, rank_loads); });
}

twResult_t twPlanSlots(const twPlanConfig_t* config, const int32_t* map, int32_t* replicas, int32_t* slots,
                       int32_t width) {
  return tw::api::enter([&] { return plan_slots(config, map, replicas, slots, width); });
}

twResult_t twPlanMoves(const twPlanConfig_t* config, const int32_t* old_map, const int32_t* new_map,
                       twPlanMove_t* moves, int64_t room, int64_t* count) {
  return tw::api::enter([&] { return plan_moves(config, old_map, new_map, moves, room, count); });
}
