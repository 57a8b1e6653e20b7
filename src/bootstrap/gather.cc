#include <unistd.h>

#include "bootstrap/bootstrap.h"

namespace tw {

void Fd::reset() {
  if (fd_ >= 0) ::close(fd_);
  fd_ = -1;
}

Status gather(Bootstrap& bootstrap, std::span<const int> members, uint64_t tag, const Parcel& mine, TimePoint deadline,
              const char* occasion, std::vector<Parcel>* all) {
  const std::vector<Presence> presence = bootstrap.exchange(members, tag, mine, deadline, all);
  std::string late;
  std::string gone;
  for (size_t i = 0; i < members.size(); ++i) {
    if (presence[i] == Presence::kHere) continue;
    std::string& list = presence[i] == Presence::kGone ? gone : late;
    list += (list.empty() ? "" : ", ") + std::to_string(members[i]);
  }
  if (!gone.empty()) return fail(twPeerDied, "%s: rank %s is gone", occasion, gone.c_str());
  if (!late.empty()) return fail(twTimeout, "%s: rank %s did not arrive in time", occasion, late.c_str());
  return {};
}

}  // namespace tw
