// Checks a caller's placement and maps, makes a layer's map into what routing reads (ExpertMap), chooses slots for a
// routing on the host, and adds up load statistics over channels. The choice must be that of exchange/replicas.h and of
// the kernels, and the digest the same on ranks with the same map: else rows go to other ranks than on another backend
// (the bits of results), or ranks that agree get twBoundMismatch.
#include "core/placement.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "exchange/loads.h"
#include "exchange/notes.h"
#include "layout/window_map.h"

namespace tw {
namespace {
constexpr int64_t kMaxEntries = int64_t{1} << 24;  // entries of all layers' maps, which each rank keeps and compares
}

Status check_map(const PlacementSpec& spec, int32_t layer, const int32_t* slot_expert, const float* shares) {
  const auto expert_at = [&](int32_t p) {
    return layer < 0 ? Argument("slot_expert[]", p) : Argument("config.placement->slot_expert[]", layer, p);
  };
  const auto share_at = [&](int32_t p) {
    return layer < 0 ? Argument("slot_shares[]", p) : Argument("config.placement->slot_shares[]", layer, p);
  };
  std::vector<int32_t> held(spec.experts, 0);
  std::vector<double> shared(spec.experts, 0.0);
  for (int32_t p = 0; p < spec.slots; ++p) {
    const int32_t expert = slot_expert[p];
    if (expert < -1 || expert >= spec.experts) {
      return fail(twInvalidArgument, "{} is {}; it must be -1 (none) or from 0 to {}", expert_at(p), Value(expert),
                  spec.experts - 1);
    }
    if (shares != nullptr && !(shares[p] >= 0.0f && std::isfinite(shares[p]))) {
      return fail(twInvalidArgument, "{} is {}; it must be finite and at least 0", share_at(p), shares[p]);
    }
    if (expert < 0) continue;
    ++held[expert];
    shared[expert] += shares != nullptr ? static_cast<double>(shares[p]) : 1.0;
  }
  for (int32_t e = 0; e < spec.experts; ++e) {
    if (held[e] == 0) {
      return fail(twInvalidArgument, "{} has no slot of expert {}; each of 0 to {} must have one", expert_at(-1), e,
                  spec.experts - 1);
    }
    if (shared[e] <= 0.0) {
      return fail(twInvalidArgument, "{} of expert {} are all 0; one of its slots must have more", share_at(-1), e);
    }
  }
  return {};
}

Status check_placement(const twPlacement_t* given, int32_t experts, PlacementSpec* spec) {
  spec->experts = spec->slots = experts;
  if (given == nullptr) return {};
  spec->given = true;
  if (given->num_layers != 0) spec->layers = given->num_layers;
  if (given->num_slots != 0) spec->slots = given->num_slots;
  spec->policy = given->policy;
  TW_RETURN_IF_FAILED(check_range("config.placement->num_layers", spec->layers, 1, TW_MAX_LAYERS));
  TW_RETURN_IF_FAILED(check_range("config.placement->num_slots", spec->slots, experts, TW_MAX_EXPERTS));
  const auto entries = int64_t{spec->layers} * spec->slots;
  if (entries > kMaxEntries) {
    return fail(twInvalidArgument, "{} is {}; with {} slots it must be from {} to {}",
                Argument("config.placement->num_layers"), Value(spec->layers), spec->slots, Least(1),
                Most(kMaxEntries / spec->slots));
  }
  TW_RETURN_IF_FAILED(check_range("config.placement->policy", given->policy, twReplicaRoundRobin, twReplicaBalanced));
  TW_RETURN_IF_FAILED(check_range("config.placement->count_loads", given->count_loads, 0, 1));
  spec->counts_loads = given->count_loads != 0;
  spec->decay = given->load_decay;
  if (!(spec->decay >= 0.0f && spec->decay < 1.0f)) {
    return fail(twInvalidArgument, "{} is {}; it must be at least 0 and below 1",
                Argument("config.placement->load_decay"), spec->decay);
  }
  TW_RETURN_IF_FAILED(check_range("config.placement->moves", given->moves, 0, 1));
  spec->moves = given->moves != 0;
  if (spec->moves && !spec->counts_loads) {
    return fail(twInvalidArgument, "{} is 1; that needs {} 1: dispatches tell how far a rank is beside what they count",
                Argument("config.placement->moves"), Argument("config.placement->count_loads"));
  }
  if (given->weight_bytes > static_cast<uint64_t>(INT64_MAX / 2)) {
    return fail(twInvalidArgument, "{} is {}; it must be from {} to {}", Argument("config.placement->weight_bytes"),
                Value(given->weight_bytes), Least(0), Most(INT64_MAX / 2));
  }
  spec->weight_bytes = (given->weight_bytes + kPageAlignment - 1) / kPageAlignment * kPageAlignment;
  if (given->slot_shares != nullptr && spec->policy != twReplicaShares) {
    return fail(twInvalidArgument, "{} is given; only policy {} has them", Argument("config.placement->slot_shares"),
                TW_CONSTANT(twReplicaShares));
  }
  const auto all = static_cast<size_t>(entries);
  if (given->slot_expert != nullptr) {
    spec->slot_expert.assign(given->slot_expert, given->slot_expert + all);
  } else {
    for (size_t i = 0; i < all; ++i) {
      spec->slot_expert.push_back(static_cast<int32_t>(i % static_cast<size_t>(spec->slots)) % experts);
    }
  }
  if (given->slot_shares != nullptr) spec->slot_shares.assign(given->slot_shares, given->slot_shares + all);
  for (int32_t layer = 0; layer < spec->layers; ++layer) {
    TW_RETURN_IF_FAILED(check_map(*spec, layer, spec->map(layer), spec->shares(layer)));
  }
  return {};
}

void PlacementSpec::replace(int32_t layer, const int32_t* experts_of, const float* shares_of) {
  const int64_t begin = int64_t{layer} * slots;
  std::copy_n(experts_of, slots, slot_expert.begin() + begin);
  if (shares_of != nullptr && slot_shares.empty()) slot_shares.assign(slot_expert.size(), 1.0f);
  if (shares_of != nullptr) std::copy_n(shares_of, slots, slot_shares.begin() + begin);
  if (shares_of == nullptr && !slot_shares.empty()) std::fill_n(slot_shares.begin() + begin, slots, 1.0f);
}

ExpertMap::ExpertMap(const PlacementSpec& spec, int32_t layer, const int32_t* experts_of, const float* shares_of,
                     const Placement& placement, int32_t me)
    : rank_(me), digest_(mix_digest(kDigestSeed, static_cast<uint64_t>(layer))) {
  const auto share_of = [&](int32_t p) { return shares_of != nullptr ? shares_of[p] : 1.0f; };
  std::vector<std::vector<int32_t>> by_expert(spec.experts);
  for (int32_t p = 0; p < spec.slots; ++p) {
    const uint64_t share = std::bit_cast<uint32_t>(share_of(p));
    digest_ = mix_digest(digest_, static_cast<uint32_t>(experts_of[p]) | share << 32);
    if (experts_of[p] >= 0 && share_of(p) > 0.0f) by_expert[experts_of[p]].push_back(p);
  }
  for (int32_t e = 0; e < spec.experts; ++e) {
    std::vector<int32_t>& slots = by_expert[e];
    const auto elsewhere = [&](int32_t p) { return placement.rank[p] != me; };
    if (spec.policy == twReplicaLocalFirst && !std::all_of(slots.begin(), slots.end(), elsewhere)) {
      slots.erase(std::remove_if(slots.begin(), slots.end(), elsewhere), slots.end());
    }
    first_.push_back(static_cast<int32_t>(slots_.size()));
    if (slots.size() > 1) several_.push_back(e);
    slots_.insert(slots_.end(), slots.begin(), slots.end());
    if (spec.policy != twReplicaShares) continue;
    double total = 0.0;
    for (const int32_t p : slots) total += static_cast<double>(share_of(p));
    double before = 0.0;
    for (const int32_t p : slots) {
      lower_.push_back(static_cast<uint32_t>(std::min(std::floor(before / total * 4294967296.0), 4294967295.0)));
      before += static_cast<double>(share_of(p));
    }
  }
  first_.push_back(static_cast<int32_t>(slots_.size()));
}

Replicas ExpertMap::view() const {
  Replicas view;
  view.first = first_.data();
  view.slots = slots_.data();
  view.lower = lower_.empty() ? nullptr : lower_.data();
  view.several = several_.data();
  view.several_count = static_cast<int32_t>(several_.size());
  view.rank = rank_;
  return view;
}

void sum_channels(const PlacementSpec& spec, const Shape& shape, const ChannelLoads& channels, float* loads,
                  int64_t* counted) {
  std::fill_n(loads, int64_t{spec.layers} * spec.experts, 0.0f);
  if (counted != nullptr) std::fill_n(counted, spec.layers, 0);
  for (int32_t layer = 0; layer < spec.layers; ++layer) {
    uint32_t newest = channels.clocks[layer];
    for (int32_t channel = 1; channel < shape.channels; ++channel) {
      newest += CountedCall::since(channels.clocks[int64_t{channel} * spec.layers + layer], newest);
    }
    for (int32_t channel = 0; channel < shape.channels; ++channel) {
      const int64_t row = int64_t{channel} * spec.layers + layer;
      if (counted != nullptr) counted[layer] += channels.dispatches[row];
      const uint32_t age = CountedCall::since(newest, channels.clocks[row]);
      for (int32_t e = 0; e < spec.experts; ++e) {
        loads[int64_t{layer} * spec.experts + e] +=
            aged_load(channels.averages[row * spec.experts + e], spec.decay, age);
      }
    }
  }
}

void count_choices(const Shape& shape, const Routing& routing, int32_t* choices) {
  std::fill_n(choices, shape.choices(), 0);
  for (int64_t i = 0; i < static_cast<int64_t>(routing.tokens) * shape.top_k; ++i) {
    if (routing.ids[i] >= 0) ++choices[routing.ids[i]];
  }
}

void choose_slots(const Shape& shape, const Placement& placement, const ExpertMap& map, twReplicaPolicy_t policy,
                  Routing* routing) {
  const Replicas replicas = map.view();
  const int64_t choices = static_cast<int64_t>(routing->tokens) * shape.top_k;
  if (policy != twReplicaBalanced) {
    for (int64_t i = 0; i < choices; ++i) {
      int32_t& id = routing->ids[i];
      if (id >= 0) id = replicas.choose(id, static_cast<int32_t>(i / shape.top_k));
    }
    return;
  }
  std::vector<int32_t> counts(shape.choices());
  std::vector<int32_t> load(shape.ranks, 0);
  std::vector<int32_t> quota(shape.experts, 0);
  count_choices(shape, *routing, counts.data());
  for (int32_t e = 0; e < shape.choices(); ++e) {
    if (replicas.count(e) == 1) load[placement.rank[replicas.slots[replicas.first[e]]]] += counts[e];
  }
  level_loads(replicas, [&](int32_t slot) { return placement.rank[slot]; }, counts.data(), load.data(), quota.data());
  std::fill(counts.begin(), counts.end(), 0);
  for (int64_t i = 0; i < choices; ++i) {
    int32_t& id = routing->ids[i];
    if (id >= 0) id = quota_slot(replicas, quota.data(), id, counts[id]++);
  }
}

}  // namespace tw
