// Where the host waits for what was launched. How long that takes the peers decide, so the caller may end it
// (core/interrupt.h).
//
// Takes a stream or the device; gives the first CUDA error, or, in end_of(), the end of a step as far as the host knows
// it.
//
// What breaks if this changes: S6: a wait must end, and a wait that the caller ends gives up the group, which ends its
// kernels. An error that is left in CUDA is found by the next launch.
#include <algorithm>
#include <future>
#include <system_error>
#include <thread>

#include "cuda/host/backend.h"

namespace tw::cuda {

void NvlinkBackend::settle() { (void)wait_for_calls(); }

cudaError_t NvlinkBackend::wait_for_calls() {
  const OnDevice on(device_);
  const OutsideCaptures outside;
  cudaError_t first = cudaSuccess;
  const auto keep = [&first](cudaError_t error) { first = first == cudaSuccess ? error : first; };
  if (in_process_) {
    for (void* stream : streams_) keep(settle_stream(static_cast<cudaStream_t>(stream)));
  } else {
    keep(settle_device());
  }
  (void)cudaGetLastError();  // of a stream that is gone, say: the next launch must not find it
  return first;
}

cudaError_t NvlinkBackend::settle_stream(cudaStream_t stream) {
  using std::chrono::microseconds;
  if (!is_interruptible()) return cudaStreamSynchronize(stream);
  const auto began = std::chrono::steady_clock::now();
  for (;;) {
    const cudaError_t error = cudaStreamQuery(stream);
    if (error != cudaErrorNotReady) return error;
    (void)cudaGetLastError();
    if (is_interrupted()) break;
    const auto waited = std::chrono::duration_cast<microseconds>(std::chrono::steady_clock::now() - began);
    std::this_thread::sleep_for(std::clamp(waited / 16, microseconds(5), microseconds(1000)));
  }
  give_up();
  return cudaStreamSynchronize(stream);
}

// Waits for the device. Nobody can be asked whether a device's work is done, graphs included: another thread waits for
// it.
cudaError_t NvlinkBackend::settle_device() {
  if (!is_interruptible()) return cudaDeviceSynchronize();
  std::future<cudaError_t> settled;
  try {
    settled = std::async(std::launch::async, [device = device_] {
      const OnDevice on(device);
      const OutsideCaptures outside;
      return cudaDeviceSynchronize();
    });
  } catch (const std::system_error&) {  // the system gives no thread
    return cudaDeviceSynchronize();
  }
  while (settled.wait_for(kInterruptLook) != std::future_status::ready) {
    if (!is_interrupted()) continue;
    give_up();
    break;
  }
  return settled.get();
}

// Gives the end of a step, as far as the host knows it: launched, unless TOKENWAY_BLOCKING asks to wait.
StepEnd NvlinkBackend::end_of(void* stream, const Status& run) {
  StepEnd end;
  if (!run.ok()) {
    end = {run.code == twInterrupted ? twInterrupted : twInternalError, context_.me, {}, 0};
    return end;
  }
  if (!blocking_ || captures(stream)) return end;
  const OnDevice on(device_);
  if (settle_stream(static_cast<cudaStream_t>(stream)) != cudaSuccess) {
    return {twInternalError, context_.me, {}, 0};
  }
  if (was_interrupted()) return {twInterrupted, -1, {}, 0};
  const std::lock_guard lock(arena_->reports);
  Report report;
  if (control_->next_failure(&report) || arena_->next_call(view_, &report)) {
    if (report.result == twRecvOverflow) return end;  // read_counts tells it, in numbers
    end.code = static_cast<twResult_t>(report.result);
    end.peer = report.peer;
    end.seen.step = report.seen;
    end.note = report.note;
  } else if (control_->find_abort().kind != 0) {
    end.code = twExcluded;
  } else if (control_->dead() >= 0) {
    end = {twPeerDied, control_->dead(), {}, 0};
  }
  return end;
}

}  // namespace tw::cuda
