#include <unistd.h>

#include <algorithm>

#include "bootstrap/bootstrap.h"

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
  const std::vector<Presence> presence = bootstrap.exchange(members, tag, mine, deadline, all);
  std::vector<int> late;
  std::vector<int> gone;
  for (size_t i = 0; i < members.size(); ++i) {
    if (presence[i] == Presence::kLate) late.push_back(members[i]);
    if (presence[i] == Presence::kGone) gone.push_back(members[i]);
  }
  if (!gone.empty()) return fail(twPeerDied, "%s: rank %s is gone", occasion, ranks_text(gone).c_str());
  if (!late.empty()) return fail(twTimeout, "%s: rank %s did not arrive in time", occasion, ranks_text(late).c_str());
  return {};
}

}  // namespace tw
