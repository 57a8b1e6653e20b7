// What a rank gives to other processes for device memory: file descriptors, which sockets carry between processes of a
// host, and fabric handles, which are 64 bytes and are good in a whole NVLink domain, where the platform grants them to
// a process. They are asked for first; where they are refused, descriptors stand for them.
//
// Takes a device and the driver; gives the kinds that memory is made for, and an Offer of a part of it.
//
// What breaks if this changes: an Offer travels as it lies, so all processes of a comm must have one layout of it.
#pragma once

#include "cuda/driver/driver.h"
#include "cuda/driver/nvml.h"

namespace tw::cuda {

// Kinds of handles that memory is made for.
struct HandleKinds {
  bool descriptors = false;
  bool fabric = false;
  bool network = false;  // not a handle: the memory may be registered with a NIC, as the network's must be
};

// What a rank says of memory that it gives. A descriptor, if any, goes beside it.
struct Offer {
  uint64_t bytes = 0;   // that were allocated: a reader maps as many
  int32_t fabric = 0;   // 1: `handle` is one
  int32_t refusal = 0;  // CUresult of the driver that refused one
  CUmemFabricHandle handle{};
};

// Whether a device and its driver know fabric handles; the platform may refuse them all the same.
bool knows_fabric_handles(const Driver& driver, int device);

// The properties of memory of a device.
CUmemAllocationProp properties(int device, HandleKinds kinds);

// The UUID of a device, zeros if there is no such device.
Uuid uuid_of(int device);

// The error that fabric handles are needed, and the driver refuses them.
Status fabric_refused(const Driver& driver, const char* what, CUresult result);

}  // namespace tw::cuda
