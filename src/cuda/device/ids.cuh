// The caller's ids and weights: how they are read, checked, made physical experts, and reported where they are bad.
//
// Takes IdsIn; gives ids that are either -1 or below in.limit, and physical experts where the group has a map.
// Everything is read past the first-level cache.
//
// What breaks if this changes: slots follow from ids alone, so all blocks that read a token must come to the same ids
// (S9); an id that is not checked is used as an index.
#pragma once

#include "cuda/device/wait.cuh"
#include "exchange/epochs.h"
#include "exchange/replicas.h"

namespace tw::cuda {

// Gives where the k-th id of a token lies, in bytes from in.ids.
__device__ inline int64_t id_offset(const IdsIn& in, int token, int k) {
  return (token * in.id_stride[0] + k * in.id_stride[1]) << (in.wide ? 3 : 2);
}
// Gives an id as the caller has it.
__device__ inline int64_t raw_id(const IdsIn& in, int token, int k) {
  const auto* const at = static_cast<const std::byte*>(in.ids) + id_offset(in, token, k);
  return in.wide ? static_cast<int64_t>(load_fresh<unsigned long long>(at))
                 : static_cast<int32_t>(load_fresh<uint32_t>(at));
}
__device__ inline float raw_weight(const IdsIn& in, int token, int k) {
  if (in.weights == nullptr) return 1.0f;
  const int64_t at = token * in.weight_stride[0] + k * in.weight_stride[1];
  return __uint_as_float(load_fresh<uint32_t>(in.weights + at));
}
// Turns an id of no expert into -1.
__device__ inline int32_t valid_id(const IdsIn& in, int64_t id) {
  return id >= 0 && id < in.limit ? static_cast<int32_t>(id) : -1;
}

// Whether an id stands before the k-th place of its token. Several of those before it are on their way at once: looking
// at one after the other takes as long as a small dispatch.
__device__ inline bool repeats(const IdsIn& in, int token, int k, int64_t raw) {
  constexpr int kAtOnce = 8;
  bool found = false;
#pragma unroll 1
  for (int base = 0; base < k; base += kAtOnce) {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) found |= base + i < k && raw_id(in, token, base + i) == raw;
  }
  return found;
}

// Calls visit(i, token, k, raw, id) for each choice of a batch, the i-th of all. id is -1 unless `raw` is an expert's
// that stands nowhere before in its token. By a block; a thread has one choice at a time.
template <class Visit>
__device__ inline void visit_choices(const IdsIn& in, int tokens, int top_k, Visit&& visit) {
  const int64_t choices = int64_t{tokens} * top_k;
#pragma unroll 1
  for (int64_t i = threadIdx.x; i < choices; i += kThreads) {
    const auto token = static_cast<int>(i / top_k);
    const auto k = static_cast<int>(i - int64_t{token} * top_k);
    const int64_t raw = raw_id(in, token, k);
    const bool again = repeats(in, token, k, raw);
    visit(i, token, k, raw, again ? -1 : valid_id(in, raw));
  }
}

// Gives a layer's map, which lies from `first` on (launch/expert_tables.h, MapWords).
__device__ inline Replicas replicas_at(const GroupView& g, const int32_t* first) {
  const Shape& shape = g.map.shape();
  Replicas replicas;
  replicas.first = first;
  replicas.slots = first + MapWords::slots(shape);
  replicas.lower = g.by_shares ? reinterpret_cast<const uint32_t*>(first + MapWords::lower(shape)) : nullptr;
  replicas.several = first + MapWords::several(shape);
  replicas.rank = g.me;
  return replicas;
}
// Gives the map by which a call's ids become physical experts; where maps move, that of the version that the channel
// has. Dispatches do not ask: their blocks run beside the one that makes the version of the next. NULL: they are
// physical.
__device__ inline const uint32_t* map_of(const GroupView& g, const IdsIn& in, int channel) {
  if (in.head == nullptr) return in.map;
  const uint32_t head = load_fresh<uint32_t>(in.head);
  const MapVersion version = unpack_version(load_fresh<unsigned long long>(&g.loads.moving.versions[channel]));
  return in.map + MapHead::chosen(head, version) * MapWords::all(g.map.shape());
}
// Gives the physical expert for a valid id by a map, out of device memory.
__device__ inline int32_t slot_of(const GroupView& g, const uint32_t* map, int32_t id, int token) {
  if (map == nullptr || id < 0) return id;
  return replicas_at(g, reinterpret_cast<const int32_t*>(map) + MapWords::kFirst).choose(id, token);
}

// Gives what a dispatch, or an exchange of counts, tells of the map behind its ids. `at`: where that is; NULL: there is
// none.
__device__ inline uint32_t load_digest(const uint32_t* at) { return at == nullptr ? 0 : load_fresh<uint32_t>(at); }

// Reports an id that is neither -1 nor an expert's, or stands twice in its token.
__device__ inline void write_bad_id(const GroupView& g, const Step& step, int token, int k, int64_t id) {
  report_call(g, &g.pages[g.me]->bad_id, [&](Report* to) {
    write_report(to, g, step, twInvalidArgument, g.me, 0, 0);
    volatile Report& report = *to;
    report.token = token;
    report.k = k;
    report.value = id;
  });
}
// The same, one for each step.
__device__ __noinline__ static void report_id(const GroupView& g, Step step, int token, int k, int64_t id) {
  if (atomicExch(&g.channels[step.channel].bad_step, step.low()) == step.low()) return;
  write_bad_id(g, step, token, k, id);
}

}  // namespace tw::cuda
