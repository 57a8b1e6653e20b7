// Ranks of a group that meet between steps, to tell each other what their callers give (twGroupMeet). They meet twice:
// each gives its bytes, then says whether it has those of all.
//
// What must hold: whatever comes of it, each rank that makes the call has used up one occasion, and none goes on with
// the bytes of a rank that has given up. A rank that comes late finds what the others gave before; that they no longer
// stand by it the second meeting tells.
#include <algorithm>
#include <cstring>

#include "core/group.h"

namespace tw {
namespace {

// Meetings of the call, as offsets from its tags, in order.
enum MeetStage : uint64_t { kGive, kHave };

constexpr char kMeeting[] = "meeting in a group";

// Takes what each rank has given, if all have given as much as this one.
Status take(const std::vector<Parcel>& cards, size_t bytes, std::byte* all) {
  std::vector<std::string> given;
  for (size_t rank = 0; rank < cards.size(); ++rank) {
    Unpacker reader(cards[rank].bytes);
    TW_RETURN_IF_FAILED(read_result(static_cast<int>(rank), reader));
    given.push_back(reader.get_bytes());
    if (!reader.ok()) return fail(twConfigMismatch, "what rank {} tells cannot be read", rank);
  }
  for (size_t rank = 1; rank < given.size(); ++rank) {
    if (given[rank].size() == given[0].size()) continue;
    return fail(twConfigMismatch, "{} differs: rank 0 has {}, rank {} has {}", Argument("bytes"), given[0].size(), rank,
                given[rank].size());
  }
  for (size_t rank = 0; bytes > 0 && rank < given.size(); ++rank) {
    std::memcpy(all + rank * bytes, given[rank].data(), bytes);
  }
  return {};
}

// Each meeting has a patience of its own: when the second begins, all are in the call, and one that came to the first
// at the last moment still says so in time.
Status meet(twGroup& group, std::span<const std::byte> mine, const Status& readable, std::chrono::milliseconds patience,
            uint64_t tags, std::byte* all) {
  Bootstrap& bootstrap = *group.comm->bootstrap;
  const auto deadline = [&] { return std::chrono::steady_clock::now() + patience; };
  const auto finished = [&] { return group.is_sticky() || group.backend->find_abort().kind != 0; };
  Opening opening(bootstrap, {Call::kMeet, group.number},
                  [&](int member) { return finished() || group.has_left(group.rank_of(member)); });
  Packer card = pack_result(readable);
  card.add_bytes(mine.data(), mine.size());
  std::vector<Parcel> cards;
  Status met = gather(opening, group.members, tags + kGive, {card.take(), {}}, deadline(), kMeeting, &cards);
  TW_RETURN_IF_FAILED(opening.mismatch());
  if (met.code == twInterrupted) return met;
  if (!readable.ok()) met = readable;
  if (met.ok()) met = take(cards, mine.size(), all);
  if (met.ok()) return agree(bootstrap, group.members, tags + kHave, deadline(), kMeeting, {});
  bootstrap.give(group.members, tags + kHave, pack_result(met).take());  // and waits for nobody, who may never come
  return met;
}

}  // namespace

Status meet_in_group(twGroup& group, std::span<const std::byte> mine, const Status& readable, int32_t timeout_ms,
                     std::byte* all) {
  const uint64_t tags = group.comm->next_tags();
  if (Status usable = check_usable(group, twPhaseNone); !usable.ok()) {
    // Peers hear that this rank does not come, also those that do something else at this occasion.
    Opening(*group.comm->bootstrap, {Call::kMeet, group.number}).give(group.members, tags, pack_result(usable).take());
    return usable;
  }
  const std::chrono::milliseconds patience(timeout_ms > 0 ? timeout_ms : group.config.given.timeout_ms);
  return end_meeting(group, tags, meet(group, mine, readable, patience, tags, all));
}

}  // namespace tw
