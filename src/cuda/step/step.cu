// Steps without rows: a refusal, and the self-test of packets. Also the loading of all kernels (launch/loading.h).
//
// The refusal takes RefuseParams and ends a step as any kernel does; the self-test takes a counter and adds what
// arrived torn, or never came.
//
// What breaks if this changes: S2 (a refusal waits for the peers' signals before the next step may begin), S1 (a
// refused dispatch skips as the dispatch would have), S4 (a self-test that misses torn packets lets them be used).
#include <cuda_runtime.h>

#include <mutex>

#include "cuda/device/loads.cuh"
#include "cuda/device/wait.cuh"
#include "cuda/launch/launch.h"
#include "cuda/launch/loading.h"
#include "cuda/launch/posts.h"
#include "cuda/launch/steps.h"
#include "cuda/step/waits.cuh"

namespace tw::cuda {

int load_dispatch(const Shape& shape);
int load_combine(const Shape& shape);
int load_combine_fp8(const Shape& shape);
int load_values(const Shape& shape);
int load_choice_packets(const Shape& shape);
int load_choices_bulk(const Shape& shape);
int load_bias_kernels(const Shape& shape);
int load_balance(const Shape& shape);
int load_counts(const Shape& shape);
int load_gather(const Shape& shape);
int load_layout(const Shape& shape);
int load_reduce(const Shape& shape);
int load_sharing(const Shape& shape);
int load_rank_view(const Shape& shape);
int load_expert_view(const Shape& shape);
int load_few_rows_view(const Shape& shape);
int load_dispatch_by_expert(const Shape& shape);
int load_index_lists(const Shape& shape);
int load_source_counts(const Shape& shape);
int load_land();
int load_posts();
int load_folds();

namespace {

// Tells the peers, which wait in the same call, and waits for their signals: S2 wants the step's end before the next
// one begins. A refused dispatch takes the step that the dispatch would have taken: see device/wait.cuh, skip_step.
__global__ void refuse_kernel(const __grid_constant__ RefuseParams p) {
  Step step{next_step(p.group, p.channel), p.channel, 0, p.phase};
  begin_at_bank(p.group, p.bank, &step.number);
  if (p.skips) ++step.number;
  // A combine of a dispatch that failed is no step: the peers skip it too.
  if (is_sticky(p.group) || (p.status != nullptr && *p.status != twSuccess)) return;
  // A part behind one that failed was not sent, by any rank (combine/end.cuh, can_combine).
  const ChannelState& channel = p.group.channels[p.channel];
  if (p.skips && channel.failed == channel.step) return;
  __syncthreads();
  if (p.bank >= 0 && static_cast<int>(step.number & 1) != p.bank) {
    publish_empty(p.group, step, Mode::kSkip);
    await_all(p.group, step, Look::kTakesPart);
    ++step.number;
  }
  if (threadIdx.x == 0) clear_counters(p.group, step);
  if (p.send) {
    if (p.phase == twPhaseDispatch) tell_refusal(p.group, p.channel);
    publish_empty(p.group, step, Mode::kRefused);
    if (threadIdx.x == 0) say_sent(p.group, step, true);
  }
  if (!p.receive) return;
  await_all(p.group, step, Look::kTakesPart);
  if (threadIdx.x == 0) end_step(p.group, step, begin_end(p.group, step));
}

constexpr uint64_t kTestFlag = uint64_t{1} << 63;  // a bit that no step has

// Gives what a packet carries in a round: every byte differs from round to round and place to place.
__device__ uint64_t test_word(int round, uint32_t place) {
  return (static_cast<uint64_t>(round) * 0x9e3779b97f4a7c15ull) ^ (place * 0xff51afd7ed558ccdull);
}

// Sends packets from every rank to every other, round after round in alternating banks, and looks whether what comes
// with a flag is what was sent with it.
__global__ void self_test_kernel(const __grid_constant__ SelfTestParams p) {
  const GroupView& g = p.group;
  const WindowMap& map = g.map;
  const int ranks = map.shape().ranks;
  const auto pairs = static_cast<uint32_t>(min(packet_row_bytes(map.shape()) / 16, uint64_t{1024}));
  const bool flagged = threadIdx.x % kPacketThreads == kPacketThreads - 1;
  uint32_t torn = 0;
  for (int round = 1; round <= p.rounds; ++round) {
    const int bank = round & 1;
    const uint64_t flag = kTestFlag | static_cast<uint64_t>(round);
    for (int distance = 1; distance < ranks; ++distance) {
      const int peer = (g.me + distance) % ranks;
      std::byte* const packet = window_of(g, peer) + map.packet(0, bank, g.me, 0);
      for (uint32_t i = threadIdx.x; i < pairs; i += blockDim.x) {
        put_pair(packet + 16 * i, test_word(round, 2 * i), flagged ? flag : test_word(round, 2 * i + 1));
      }
    }
    for (int distance = 1; distance < ranks; ++distance) {
      const std::byte* const packet = g.windows[g.me] + map.packet(0, bank, (g.me + distance) % ranks, 0);
      for (uint32_t base = threadIdx.x / 32 * 32; base < pairs; base += blockDim.x) {
        const uint32_t i = base + threadIdx.x % 32;
        const bool active = i < pairs;
        Vec16 value{};
        Patience patience(g);
        for (bool late = false;;) {
          if (active) value = load_pair(packet + 16 * i);
          if (!__any_sync(~0u, active && flagged && value.b != flag)) break;
          if (!__any_sync(~0u, patience.over(&late))) continue;
          ++torn;  // it did not come
          break;
        }
        if (!active) continue;
        if (value.a != test_word(round, 2 * i)) ++torn;
        if (value.b != (flagged ? flag : test_word(round, 2 * i + 1))) ++torn;
      }
    }
    // All threads of this rank have read the round before it sends the next but one. One failure is enough.
    if (__syncthreads_or(torn != 0)) break;
  }
  if (torn != 0) atomicAdd(p.torn, torn);
}

}  // namespace

int launch_refuse(const RefuseParams& params, void* stream) {
  return launch_kernel(refuse_kernel, params, 1, 0, false, stream, 256);
}

int launch_self_test(const SelfTestParams& params, void* stream) {
  SelfTestParams p = params;
  p.rounds = kSelfTestRounds;
  return launch_kernel(self_test_kernel, p, 1, 0, false, stream, 1024);
}

int allow_shared(const void* kernel, uint32_t bytes) {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  cudaFuncAttributes attributes;
  if (const cudaError_t loaded = cudaFuncGetAttributes(&attributes, kernel)) return loaded;
  if (static_cast<uint32_t>(attributes.maxDynamicSharedSizeBytes) >= bytes) return 0;
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
}

int load_all(std::initializer_list<const void*> kernels) {
  for (const void* const kernel : kernels) {
    if (const int error = allow_shared(kernel, 0); error != 0) return error;
  }
  return 0;
}

int load_kernels(const Shape& shape) {
  if (const int error =
          load_all({reinterpret_cast<const void*>(refuse_kernel), reinterpret_cast<const void*>(self_test_kernel)});
      error != 0) {
    return error;
  }
  for (const auto load :
       {load_dispatch, load_dispatch_by_expert, load_combine, load_combine_fp8, load_values, load_choice_packets,
        load_choices_bulk, load_bias_kernels, load_counts, load_balance, load_layout, load_gather, load_reduce,
        load_sharing, load_rank_view, load_expert_view, load_few_rows_view, load_index_lists, load_source_counts}) {
    if (const int error = load(shape); error != 0) return error;
  }
  if (const int error = load_posts(); error != 0) return error;
  if (const int error = load_pulls(); error != 0) return error;
  if (const int error = load_folds(); error != 0) return error;
  return load_land();
}

}  // namespace tw::cuda
