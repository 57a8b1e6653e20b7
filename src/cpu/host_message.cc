// Writing and reading messages between hosts (cpu/host_message.h).
#include "cpu/host_message.h"

#include <algorithm>

namespace tw::cpu {

void HostMessage::begin(std::byte* to, uint64_t room) {
  to_ = to;
  room_ = room;
  end_ = last_ = 0;
  overflowed_ = false;
}

void HostMessage::put(int rail, uint64_t offset, const void* source, size_t n) {
  const uint64_t to = target(rail, offset);
  append(source, n, &to, 1);
}

void HostMessage::put_row(int rail, uint64_t offset, const void* source, size_t n) {
  for (Open& row : open_) {
    if (row.source != source || row.bytes != n) continue;
    // Where rows are one memory (of a stride of 0), each of them is one: a record has a target of a rank once.
    const auto is_there = [&](uint64_t to) { return static_cast<int>(to >> Record::kOffsetBits) == rail; };
    if (std::ranges::any_of(row.targets, is_there)) continue;
    row.targets.push_back(target(rail, offset));
    return;
  }
  if (open_.size() == kMostOpen) close_oldest();
  Open row{source, n, {}};
  if (!spare_.empty()) {
    row.targets = std::move(spare_.back());
    spare_.pop_back();
    row.targets.clear();
  }
  row.targets.push_back(target(rail, offset));
  open_.push_back(std::move(row));
}

uint64_t HostMessage::finish() {
  while (!open_.empty()) close_oldest();
  return last_ = end_;
}

void HostMessage::close_oldest() {
  Open row = std::move(open_.front());
  open_.pop_front();
  append(row.source, row.bytes, row.targets.data(), row.targets.size());
  spare_.push_back(std::move(row.targets));
}

// Whether bytes lie right behind those of the last record, at all its targets.
bool HostMessage::follows(const uint64_t* targets, size_t count, size_t n) const {
  if (last_ == end_) return false;
  Record record;
  std::memcpy(&record, to_ + last_, sizeof record);
  if (record.targets != count || record.bytes + n > kMostRecord) return false;
  for (size_t i = 0; i < count; ++i) {
    uint64_t before = 0;
    std::memcpy(&before, to_ + last_ + Record::head(i), sizeof before);
    if (before + record.bytes != targets[i]) return false;
  }
  return true;
}

void HostMessage::append(const void* source, size_t n, const uint64_t* targets, size_t count) {
  if (n == 0 || overflowed_) return;
  const bool more = follows(targets, count, n);
  const uint64_t begin = more ? end_ : Record::padded(end_);
  const uint64_t needed = Record::padded(begin + (more ? 0 : Record::head(count)) + n);
  if (needed > room_) {
    overflowed_ = true;
    return;
  }
  Record record{static_cast<uint32_t>(n), static_cast<uint32_t>(count)};
  if (more) {
    std::memcpy(&record, to_ + last_, sizeof record);
    record.bytes += static_cast<uint32_t>(n);
  } else {
    last_ = begin;
    end_ = begin + Record::head(count);
    std::memcpy(to_ + begin + sizeof record, targets, sizeof(uint64_t) * count);
  }
  std::memcpy(to_ + last_, &record, sizeof record);
  std::memcpy(to_ + end_, source, n);
  end_ += n;
}

}  // namespace tw::cpu
