// Kernels are loaded when a group is created: loading one later would wait for those that run.
#pragma once

#include <cstdint>

#include "layout/shape.h"

namespace tw::cuda {

// Loads a kernel onto the current device and lets it have so much shared memory. Never less than before: groups of
// other shapes use the same kernel.
int allow_shared(const void* kernel, uint32_t bytes);
// Loads every kernel, so that none is loaded while ranks wait for each other.
int load_kernels(const Shape& shape);

}  // namespace tw::cuda
