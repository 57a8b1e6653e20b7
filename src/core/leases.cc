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
    return fail(bytes == 0 ? twInvalidArgument : twOutOfMemory, "{} is {}; it must be from 1 to lease_bytes, {}",
                Argument("bytes"), Value(bytes), bytes_);
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
  return fail(twOutOfMemory, "no lease of {}: of lease_bytes, {}, {} leases have {}, and the largest gap is {}",
              bytes_text(bytes), bytes_text(bytes_), now.leases, bytes_text(now.used), bytes_text(now.largest));
}

Status LeaseArea::trim(std::byte* memory, uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  Lease& lease = leases_.at(memory);
  if (bytes == 0 || bytes > lease.bytes) {
    return fail(twInvalidArgument, "{} is {}; it must be from 1 to what the lease has, {}", Argument("bytes"),
                Value(bytes), lease.bytes);
  }
  if (lease.announced)
    return fail(twInvalidUsage, "{} {} is announced: peers may write to all of it", Argument("memory"), memory);
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

Status LeaseArea::may_announce(const Argument& name, const void* memory, uint64_t bytes, std::byte** lease) {
  auto* const begin = static_cast<std::byte*>(const_cast<void*>(memory));
  const std::lock_guard lock(mutex_);
  auto found = leases_.upper_bound(begin);
  if (found == leases_.begin())
    return fail(twInvalidArgument, "{} is {}, which is no lease of this group", name, memory);
  --found;
  const auto at = static_cast<uint64_t>(begin - found->first);
  if (at >= found->second.bytes || found->second.given) {
    return fail(twInvalidArgument, "{} is {}, which is no lease of this group", name, memory);
  }
  if (at % kAlignment != 0) {
    return fail(twInvalidArgument, "{} is {}; from its lease's begin, {}, it must be a multiple of {} bytes", name,
                memory, found->first, kAlignment);
  }
  if (bytes > found->second.bytes - at) {
    return fail(twInvalidArgument, "{} has {} bytes; it must have {}, as many rows as may come (max_recv_tokens)", name,
                found->second.bytes - at, bytes);
  }
  if (found->second.announced) {
    return fail(twInvalidUsage, "{} is {}, which is announced already: its dispatch has not ended", name, memory);
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
