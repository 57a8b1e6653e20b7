// Loading all kernels when a group is created.
//
// Takes the group's shape; gives a cudaError_t as int. Afterwards every kernel is on the current device and may have
// the shared memory that it needs.
//
// What breaks if this changes: a kernel that is loaded later is loaded at its first launch, and loading waits for the
// kernels that run; these may be waiting for a peer that waits for the launch, until their deadline (S6).
#pragma once

#include <cstdint>
#include <initializer_list>

#include "layout/shape.h"

namespace tw::cuda {

// Loads a kernel onto the current device and allows it `bytes` of shared memory. It never allows less than before, as
// groups of other shapes use the same kernel.
int allow_shared(const void* kernel, uint32_t bytes);
// Loads kernels that need none.
int load_all(std::initializer_list<const void*> kernels);
// Loads every kernel, so that none is loaded while ranks wait for each other.
int load_kernels(const Shape& shape);

}  // namespace tw::cuda
