// LeaseArea (core/leases.h): a first-fit allocator over the lease part of a window, with a mark for pieces that peers
// may write to. All functions lock, as calls come from any thread. A piece that is given to another holder while it is
// announced is overwritten by a peer's dispatch.
#include "core/leases.h"

#include <algorithm>
#include <iterator>

namespace tw {

LeaseArea::Info LeaseArea::info() {
  const std::lock_guard lock(mutex_);
  Info info{bytes_, 0, 0, static_cast<int32_t>(leases_.size())};
  const std::byte* free = base_;
  for (const auto& [memory, lease] : leases_) {
    info.largest = std::max(info.largest, static_cast<uint64_t>(memory - free));
    info.used += lease.bytes;
    free = memory + lease.bytes;
  }
  info.largest = std::max(info.largest, static_cast<uint64_t>(base_ + bytes_ - free));
  return info;
}

Status LeaseArea::take(uint64_t bytes, std::byte** memory) {
  if (bytes == 0 || bytes > bytes_) {
    return fail(bytes == 0 ? twInvalidArgument : twOutOfMemory, "bytes is %llu; it must be from 1 to lease_bytes, %llu",
                static_cast<unsigned long long>(bytes), static_cast<unsigned long long>(bytes_));
  }
  bytes = whole(bytes);
  {
    const std::lock_guard lock(mutex_);
    std::byte* free = base_;
    auto next = leases_.begin();
    while (next != leases_.end() && static_cast<uint64_t>(next->first - free) < bytes) {
      free = next->first + next->second.bytes;
      ++next;
    }
    const std::byte* const end = next == leases_.end() ? base_ + bytes_ : next->first;
    if (static_cast<uint64_t>(end - free) >= bytes) {
      leases_.emplace_hint(next, free, Lease{bytes});
      *memory = free;
      return {};
    }
  }
  const Info now = info();
  return fail(twOutOfMemory, "no lease of %s: of lease_bytes, %s, %d leases have %s, and the largest gap is %s",
              bytes_text(bytes).c_str(), bytes_text(bytes_).c_str(), now.leases, bytes_text(now.used).c_str(),
              bytes_text(now.largest).c_str());
}

Status LeaseArea::trim(std::byte* memory, uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  Lease& lease = leases_.at(memory);
  if (bytes == 0 || bytes > lease.bytes) {
    return fail(twInvalidArgument, "bytes is %llu; it must be from 1 to what the lease has, %llu",
                static_cast<unsigned long long>(bytes), static_cast<unsigned long long>(lease.bytes));
  }
  if (lease.announced) return fail(twInvalidUsage, "memory %p is announced: peers may write to all of it", memory);
  lease.bytes = whole(bytes);
  return {};
}

Status LeaseArea::give(std::byte* memory) {
  const std::lock_guard lock(mutex_);
  const auto found = leases_.find(memory);
  if (found->second.announced) {
    found->second.given = true;
  } else {
    leases_.erase(found);
  }
  return {};
}

Status LeaseArea::may_announce(const char* name, const void* memory, uint64_t bytes, std::byte** lease) {
  auto* const begin = static_cast<std::byte*>(const_cast<void*>(memory));
  const std::lock_guard lock(mutex_);
  auto found = leases_.upper_bound(begin);
  if (found == leases_.begin())
    return fail(twInvalidArgument, "%s is %p, which is no lease of this group", name, memory);
  --found;
  const auto at = static_cast<uint64_t>(begin - found->first);
  if (at >= found->second.bytes || found->second.given) {
    return fail(twInvalidArgument, "%s is %p, which is no lease of this group", name, memory);
  }
  if (at % kAlignment != 0) {
    return fail(twInvalidArgument, "%s is %p; from its lease's begin, %p, it must be a multiple of %llu bytes", name,
                memory, static_cast<void*>(found->first), static_cast<unsigned long long>(kAlignment));
  }
  if (bytes > found->second.bytes - at) {
    return fail(twInvalidArgument, "%s has %llu bytes; it must have %llu, as many rows as may come (max_recv_tokens)",
                name, static_cast<unsigned long long>(found->second.bytes - at),
                static_cast<unsigned long long>(bytes));
  }
  if (found->second.announced) {
    return fail(twInvalidUsage, "%s is %p, which is announced already: its dispatch has not ended", name, memory);
  }
  *lease = found->first;
  return {};
}

void LeaseArea::claim(const std::vector<std::byte*>& leases) {
  const std::lock_guard lock(mutex_);
  for (std::byte* const lease : leases) leases_.at(lease).announced = true;
}

void LeaseArea::release(const std::vector<std::byte*>& leases) {
  const std::lock_guard lock(mutex_);
  for (std::byte* const lease : leases) {
    const auto found = leases_.find(lease);
    if (found == leases_.end()) continue;  // one lease serves two payloads
    found->second.announced = false;
    if (found->second.given) leases_.erase(found);
  }
}

}  // namespace tw
