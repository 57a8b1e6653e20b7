// A message to the ranks of another host: what one rank puts into their windows in a step, as records
// (layout/hosts_map.h) that stand one behind the other. HostMessage writes one into staging; deliver copies what is for
// one rank out of one.
//
// Rows that go to several of those ranks are in it once (put_row), and rows that lie one behind the other at all their
// targets become one record. What may still change when more is put lies behind sealed(): the bytes before it may be on
// their way.
//
// What breaks if this changes: both ends must read the same bytes. deliver trusts nothing: what comes from another
// process must not lead it out of the message or the window.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <vector>

#include "layout/hosts_map.h"

namespace tw::cpu {

class HostMessage {
 public:
  // Begins a message in `room` bytes at `to`.
  void begin(std::byte* to, uint64_t room);

  // Appends n bytes for the rank of that rail, at an offset of its window. put copies them at once; the memory that
  // put_row is given stays as it is until finish.
  void put(int rail, uint64_t offset, const void* source, size_t n);
  void put_row(int rail, uint64_t offset, const void* source, size_t n);

  // Ends the message, and gives its bytes.
  uint64_t finish();

  const std::byte* begins() const { return to_; }
  uint64_t bytes() const { return end_; }
  uint64_t sealed() const { return last_; }
  // Whether there was no room for something. Nothing is written beyond it.
  bool overflowed() const { return overflowed_; }

 private:
  // Rows whose targets are not all known yet.
  struct Open {
    const void* source;
    size_t bytes;
    std::vector<uint64_t> targets;
  };
  // A token's rows are put rank by rank, payload by payload; so many payloads a token has at most.
  static constexpr size_t kMostOpen = kMaxPayloads;
  static constexpr uint64_t kMostRecord = uint64_t{1} << 30;

  static uint64_t target(int rail, uint64_t offset) {
    return static_cast<uint64_t>(rail) << Record::kOffsetBits | offset;
  }
  void close_oldest();
  void append(const void* source, size_t n, const uint64_t* targets, size_t count);
  bool follows(const uint64_t* targets, size_t count, size_t n) const;

  std::byte* to_ = nullptr;
  uint64_t room_ = 0;
  uint64_t end_ = 0;   // bytes so far
  uint64_t last_ = 0;  // where the last record begins; end_ if there is none
  std::deque<Open> open_;
  std::vector<std::vector<uint64_t>> spare_;  // targets of rows that are closed, for their memory
  bool overflowed_ = false;
};

// Calls copy(offset, data, n) for all that is for the rank of that rail: n bytes for that offset of its window, which
// lie in the message. False if the message is none; what stands before that has been copied.
template <class Copy>
bool deliver(const std::byte* message, uint64_t bytes, int rail, uint64_t window_bytes, Copy&& copy) {
  constexpr uint64_t kOffset = (uint64_t{1} << Record::kOffsetBits) - 1;
  for (uint64_t at = 0; at < bytes;) {
    Record record;
    if (bytes - at < sizeof record) return false;
    std::memcpy(&record, message + at, sizeof record);
    const uint64_t head = Record::head(record.targets);
    if (bytes - at < head || bytes - at - head < record.bytes) return false;
    const std::byte* const data = message + at + head;
    for (uint32_t i = 0; i < record.targets; ++i) {
      uint64_t target = 0;
      std::memcpy(&target, message + at + Record::head(i), sizeof target);
      if (static_cast<int>(target >> Record::kOffsetBits) != rail) continue;
      const uint64_t offset = target & kOffset;
      if (offset > window_bytes || record.bytes > window_bytes - offset) return false;
      copy(offset, data, record.bytes);
    }
    at = Record::padded(at + head + record.bytes);
  }
  return true;
}

}  // namespace tw::cpu
