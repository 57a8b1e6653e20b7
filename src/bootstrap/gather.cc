// Meetings in which all must come: gather and agree turn a meeting's presences and parcels into one Status. The order
// in which they are looked at (given up, gone, late, then a peer's own error) decides which rank is named and blamed,
// and must be alike on all ranks.
#include <unistd.h>

#include <algorithm>

#include "bootstrap/bootstrap.h"
#include "core/interrupt.h"

namespace tw {

void Fd::reset() {
  if (fd_ >= 0) ::close(fd_);
  fd_ = -1;
}

std::string ranks_text(std::span<const int> ranks) {
  constexpr size_t kNamed = 8;
  std::string text;
  for (const int rank : ranks.first(std::min(ranks.size(), kNamed))) {
    text += (text.empty() ? "" : ", ") + std::to_string(rank);
  }
  if (ranks.size() > kNamed) text += " and " + std::to_string(ranks.size() - kNamed) + " others";
  return text;
}

Status gather(Bootstrap& bootstrap, std::span<const int> members, uint64_t tag, const Parcel& mine, TimePoint deadline,
              const char* occasion, std::vector<Parcel>* all) {
  const std::vector<Presence> presence = bootstrap.exchange(members, tag, mine, deadline, all, {}, Needs::kAll);
  std::vector<int> late;
  std::vector<int> gone;
  std::vector<int> gave_up;
  for (size_t i = 0; i < members.size(); ++i) {
    if (presence[i] == Presence::kLate) late.push_back(members[i]);
    if (presence[i] == Presence::kGone) gone.push_back(members[i]);
    if (presence[i] == Presence::kGaveUp) gave_up.push_back(members[i]);
  }
  if (!late.empty() && was_interrupted()) {
    return fail(twInterrupted, "%s was interrupted while rank %s had not arrived", occasion, ranks_text(late).c_str());
  }
  if (!gave_up.empty()) return fail(twPeerAborted, "%s: rank %s gave it up", occasion, ranks_text(gave_up).c_str());
  for (const int rank : gone) TW_RETURN_IF_FAILED(bootstrap.last_words(rank));
  if (!gone.empty()) return fail(twPeerDied, "%s: rank %s is gone", occasion, ranks_text(gone).c_str());
  if (!late.empty()) return fail(twTimeout, "%s: rank %s did not arrive in time", occasion, ranks_text(late).c_str());
  return {};
}

Packer pack_result(const Status& mine) {
  Packer packer;
  packer.add<int32_t>(mine.code).add_bytes(mine.text.data(), mine.text.size());
  return packer;
}

Status read_result(int rank, Unpacker& reader) {
  auto code = static_cast<twResult_t>(reader.get<int32_t>());
  if (code == twInterrupted) code = twPeerAborted;  // that rank's wait was interrupted, not this one's
  const std::string text = reader.get_bytes();
  return code == twSuccess ? Status{} : fail(code, "rank %d: %s", rank, text.c_str());
}

Status agree(Bootstrap& bootstrap, std::span<const int> members, uint64_t tag, TimePoint deadline, const char* occasion,
             const Status& mine) {
  std::vector<Parcel> all;
  Status arrived = gather(bootstrap, members, tag, {pack_result(mine).take(), {}}, deadline, occasion, &all);
  if (!mine.ok()) return mine;
  TW_RETURN_IF_FAILED(std::move(arrived));
  for (size_t rank = 0; rank < all.size(); ++rank) {
    Unpacker reader(all[rank].bytes);
    TW_RETURN_IF_FAILED(read_result(static_cast<int>(rank), reader));
  }
  return {};
}

}  // namespace tw
