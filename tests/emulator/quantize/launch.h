// src/quantize/launch.h for the emulator.
#pragma once

#include "machine.h"

namespace tw::quantize {

template <class T>
T* shared_memory() {
  return static_cast<T*>(tw::emulator::shared_bytes());
}

template <class Call>
cudaError_t launch(void (*kernel)(Call), const Call& call, dim3 grid, int threads, void* stream, uint32_t shared = 0) {
  tw::emulator::launch(
      stream, grid, dim3(static_cast<unsigned>(threads)), shared, [kernel, call] { kernel(call); },
      __PRETTY_FUNCTION__);
  return cudaSuccess;
}

}  // namespace tw::quantize
