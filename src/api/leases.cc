// The entry points of tokenway/leases.h: leases, their receive offsets, and kept windows. Calls come from any thread,
// also from garbage collection, and leases and keepers may outlive their group. check_receive_offsets is what keeps
// peers from writing outside of a lease: an offset that passes it is announced to all ranks.
#include <pthread.h>

#include <map>

#include "api/check.h"
#include "api/enter.h"
#include "api/registry.h"

namespace tw::api {
namespace {

// Every lease, with what keeps its memory mapped: a lease may outlive its group. Never destroyed, as tensors may
// outlive everything else.
struct Leases {
  std::mutex mutex;
  std::map<std::byte*, std::shared_ptr<LeaseArea>> areas;
};
Leases& all() {
  static auto* const leases = new Leases;
  return *leases;
}
// Locked around fork(), so that no other thread holds the lock in a child.
const int at_fork =
    pthread_atfork([] { all().mutex.lock(), keepers.lock(); }, [] { keepers.unlock(), all().mutex.unlock(); },
                   [] {
                     keepers.clear();  // a device's window cannot be unmapped in a child
                     keepers.unlock(), all().mutex.unlock();
                   });

Status find(void* memory, std::shared_ptr<LeaseArea>* area) {
  const auto found = all().areas.find(static_cast<std::byte*>(memory));
  if (found == all().areas.end()) {
    return fail(twInvalidArgument, "{} is {}, which is no lease, or no longer", Argument("memory"), memory);
  }
  *area = found->second;
  return {};
}

Status check_leases(const twGroup& group) {
  if (group.leases != nullptr) return {};
  return fail(twInvalidUsage, "the group has no leases: {} is 0", Argument("config.lease_bytes"));
}

}  // namespace

Status check_receive_offsets(twGroup& group, const twCountsInput_t& input, CountsCall* call,
                             std::vector<std::byte*>* leases) {
  const Shape& shape = group.shape();
  for (int q = 0; q < TW_MAX_PAYLOADS; ++q) {
    const auto* const memory = static_cast<const std::byte*>(input.landing[q]);
    if (memory == nullptr) continue;
    const Argument name("input.landing[]", q);
    if (q >= shape.payloads || group.leases == nullptr) {
      return fail(twInvalidArgument, "{} is {}; it must be NULL: the group has {} payloads, and {}", name,
                  input.landing[q], shape.payloads,
                  group.leases == nullptr ? compose("{} 0", Argument("config.lease_bytes")) : Sentence("leases"));
    }
    const uint64_t bytes = static_cast<uint64_t>(call->room) * shape.payload_bytes[q];
    std::byte* lease = nullptr;
    TW_RETURN_IF_FAILED(group.leases->may_announce(name, memory, bytes, &lease));
    for (int other = 0; other < q; ++other) {
      const auto* const before = static_cast<const std::byte*>(input.landing[other]);
      const uint64_t taken = static_cast<uint64_t>(call->room) * shape.payload_bytes[other];
      if (before == nullptr || before + taken <= memory || memory + bytes <= before) continue;
      return fail(twInvalidArgument, "{} is {}, where rows of {}, {}, land too", name, input.landing[q],
                  Argument("input.landing[]", other), input.landing[other]);
    }
    leases->push_back(lease);
    call->receive_offset[q] = static_cast<uint64_t>(memory - group.backend->window());
  }
  return {};
}

}  // namespace tw::api

using tw::Argument;
using tw::fail;
using tw::Status;
using tw::Value;
using tw::api::enter;
using tw::api::enter_group;
using tw::api::groups;
using tw::api::keepers;
using tw::api::visit;

twResult_t twWindowAlloc(twGroup_t group, uint64_t bytes, void** memory) {
  return visit(groups, "group", group, [&]() -> Status {
    TW_CHECK_NOT_NULL(memory);
    TW_RETURN_IF_FAILED(tw::api::check_leases(*group));
    const std::lock_guard lock(tw::api::all().mutex);
    std::byte* taken = nullptr;
    TW_RETURN_IF_FAILED(group->leases->take(bytes, &taken));
    tw::api::all().areas[taken] = group->leases;
    *memory = taken;
    return {};
  });
}

twResult_t twWindowTrim(void* memory, uint64_t bytes) {
  return enter([&]() -> Status {
    const std::lock_guard lock(tw::api::all().mutex);
    std::shared_ptr<tw::LeaseArea> area;
    TW_RETURN_IF_FAILED(tw::api::find(memory, &area));
    return area->trim(static_cast<std::byte*>(memory), bytes);
  });
}

twResult_t twWindowFree(void* memory) {
  return enter([&]() -> Status {
    std::shared_ptr<tw::LeaseArea> area;  // the last one unmaps the window, outside the lock
    const std::lock_guard lock(tw::api::all().mutex);
    TW_RETURN_IF_FAILED(tw::api::find(memory, &area));
    tw::api::all().areas.erase(static_cast<std::byte*>(memory));
    return area->give(static_cast<std::byte*>(memory));
  });
}

twResult_t twGroupLeaseInfo(twGroup_t group, twLeaseInfo_t* info) {
  return visit(groups, "group", group, [&]() -> Status {
    twLeaseInfo_t known{};
    if (group->leases != nullptr) {
      const tw::LeaseArea::Info now = group->leases->info();
      known = {sizeof known, now.bytes, now.used, now.largest, now.leases};
    }
    return tw::api::write_struct("info", known, info);
  });
}

twResult_t twGroupSteps(twGroup_t group, int32_t channels, uint32_t* steps) {
  return enter_group("twGroupSteps", group, [&]() -> Status {
    TW_CHECK_NOT_NULL(steps);
    if (channels != group->channels.size()) {
      return fail(twInvalidArgument, "{} is {}; it must be {}, {}", Argument("lanes"), Value(channels),
                  Argument("config.lanes"), group->channels.size());
    }
    for (int channel = 0; channel < channels; ++channel) steps[channel] = group->channels[channel].step;
    return {};
  });
}

twResult_t twWindowKeep(twGroup_t group, twWindowKeeper_t* keeper) {
  return visit(groups, "group", group, [&]() -> Status {
    TW_CHECK_NOT_NULL(keeper);
    auto made = std::make_unique<twWindowKeeper>();
    made->window = group->backend->keep_window();
    keepers.add(made.get());
    *keeper = made.release();
    return {};
  });
}

twResult_t twWindowRelease(twWindowKeeper_t keeper) {
  return enter([&]() -> Status {
    if (!keepers.remove(keeper)) {
      return fail(twInvalidArgument, "{} is {}, which is none, or no longer", Argument("keeper"), keeper);
    }
    delete keeper;
    return {};
  });
}
