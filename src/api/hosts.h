// Ranks of several hosts, each on a CUDA device, that NVLink may join: finds out whether it does, by the caller's
// allgather, and connects them over TCP.
//
// connect_hosts takes what twCommCreateCuda has, and `apart`, the sentence that says where two of the ranks are. All
// ranks come to the same end: a mesh, or twUnsupported with the first rank that cannot be joined, and why.
//
// What breaks if this changes: callers of `auto` take another backend where this says twUnsupported. If it failed on
// some ranks alone, the others would wait for them.
#pragma once

#include <functional>
#include <memory>

#include "bootstrap/bootstrap.h"

namespace tw::api {

Status connect_hosts(int rank, int size, const std::function<int(const void*, void*, size_t)>& allgather, int device,
                     const Sentence& apart, TimePoint deadline, std::unique_ptr<Bootstrap>* bootstrap);

}  // namespace tw::api
