// The caller's ids and weights: read, checked, and reported where they are bad.
#pragma once

#include "nvlink/wait.cuh"

namespace tw::nvlink {

// An id as the caller has it.
__device__ inline int64_t raw_id(const IdsIn& in, int token, int k) {
  const int64_t at = token * in.id_stride[0] + k * in.id_stride[1];
  return in.wide ? static_cast<int64_t>(load_fresh<unsigned long long>(static_cast<const int64_t*>(in.ids) + at))
                 : static_cast<int32_t>(load_fresh<uint32_t>(static_cast<const int32_t*>(in.ids) + at));
}
__device__ inline float raw_weight(const IdsIn& in, int token, int k) {
  if (in.weights == nullptr) return 1.0f;
  const int64_t at = token * in.weight_stride[0] + k * in.weight_stride[1];
  return __uint_as_float(load_fresh<uint32_t>(in.weights + at));
}
// What is no expert becomes -1.
__device__ inline int32_t valid_id(const GroupView& g, int64_t id) {
  return id >= 0 && id < g.map.shape().experts ? static_cast<int32_t>(id) : -1;
}

// Reports an id that is neither -1 nor an expert, or stands twice in its token; one for each step.
__device__ __noinline__ static void report_id(const GroupView& g, Step step, int token, int k, int64_t id) {
  if (atomicExch(&g.lanes[step.lane].bad_step, step.low()) == step.low()) return;
  report_call(g, &g.pages[g.me]->bad_id, [&](Report* to) {
    write_report(to, g, step, twInvalidArgument, g.me, 0, 0);
    volatile Report& report = *to;
    report.token = token;
    report.k = k;
    report.value = id;
  });
}

}  // namespace tw::nvlink
