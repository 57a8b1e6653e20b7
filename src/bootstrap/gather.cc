// What ranks meet by, and meetings in which all must come: own_address finds what to tell peers, and gather and agree
// turn a meeting's presences and parcels into one Status. The order in which they are looked at (given up, gone with
// its last words, gone, late, then a peer's own error) decides which rank is named and blamed, and must be alike on all
// ranks.
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

std::string own_address(Bootstrap& bootstrap, std::span<const int> members) {
  constexpr char kLocalhost[] = "127.0.0.1";
  std::string found = kLocalhost;
  for (const int member : members) {
    std::string own;
    std::string theirs;
    if (member == bootstrap.rank()) continue;
    bootstrap.addresses(member, &own, &theirs);
    if (!own.empty() && own != theirs && own != kLocalhost && own != "::1") return own;
    if (!own.empty() && found == kLocalhost) found = own;
  }
  return found;
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
    return fail(twInterrupted, "{} was interrupted while rank {} had not arrived", occasion, ranks_text(late));
  }
  if (!gave_up.empty()) return fail(twPeerAborted, "{}: rank {} gave it up", occasion, ranks_text(gave_up));
  for (const int rank : gone) TW_RETURN_IF_FAILED(bootstrap.last_words(rank));
  if (!gone.empty()) return fail(twPeerDied, "{}: rank {} is gone", occasion, ranks_text(gone));
  if (!late.empty()) return fail(twTimeout, "{}: rank {} did not arrive in time", occasion, ranks_text(late));
  return {};
}

Packer pack_result(const Status& mine) {
  const std::vector<Sentence::Part>& parts = mine.sentence.parts();
  Packer packer;
  packer.add<int32_t>(mine.code).add(static_cast<uint32_t>(parts.size()));
  for (const Sentence::Part& part : parts) {
    packer.add<int32_t>(part.kind).add_bytes(part.text.data(), part.text.size());
    packer.add_bytes(part.name.data(), part.name.size()).add(part.indices).add(part.value);
  }
  return packer;
}

Status read_status(Unpacker& reader) {
  Status status{static_cast<twResult_t>(reader.get<int32_t>()), {}};
  const auto parts = reader.get<uint32_t>();
  for (uint32_t i = 0; i < parts && reader.ok(); ++i) {
    Sentence::Part part;
    part.kind = static_cast<twPartKind_t>(reader.get<int32_t>());
    part.text = reader.get_bytes();
    part.name = reader.get_bytes();
    for (int64_t& index : part.indices) index = reader.get<int64_t>();
    part.value = reader.get<int64_t>();
    status.sentence.append(std::move(part));
  }
  return status;
}

Status read_result(int rank, Unpacker& reader) {
  Status theirs = read_status(reader);
  if (theirs.ok()) return theirs;
  if (theirs.code == twInterrupted) theirs.code = twPeerAborted;  // that rank's wait was interrupted, not this one's
  return fail(theirs.code, "rank {}: {}", rank, theirs.sentence);
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
