// Opening and call_mismatch (core/occasion.h): puts a call's occasion before each parcel and compares the occasions
// that came. If it takes ranks of different calls for one call, they create and destroy each other's groups; if it does
// not notice a difference, they wait until the timeout.
#include "core/occasion.h"

#include <algorithm>
#include <iterator>

namespace tw {
namespace {

constexpr size_t kHeaderBytes = sizeof(Call) + sizeof(uint64_t);

std::string pack(const Occasion& occasion) { return Packer().add(occasion.call).add(occasion.group).take(); }

Occasion unpack(const std::string& bytes) {
  Unpacker reader(bytes);
  Occasion occasion;
  occasion.call = reader.get<Call>();
  occasion.group = reader.get<uint64_t>();
  return occasion;
}

// Words of a sentence: "destroys a group", "destroy one" ...
std::string does(const Occasion& occasion, bool plural, bool first, bool named) {
  const char* const verbs[] = {"stray", "create", "shrink", "destroy", "grow", "meet"};
  std::string text =
      verbs[static_cast<size_t>(occasion.call) < std::size(verbs) ? static_cast<size_t>(occasion.call) : 0];
  if (!plural) text += 's';
  if (occasion.call == Call::kMeet) text += " in";
  if (!named || occasion.group == 0) return text + (first ? " a group" : " one");
  // Occasions begin at 2; calls are counted from 1.
  return text + (first ? " the group" : " the one") + " that call " + std::to_string((occasion.group >> 16) - 1) +
         " of the comm made";
}

}  // namespace

Status call_mismatch(std::span<const int> ranks, std::span<const Occasion> occasions) {
  // The sentence names groups only where the calls alone do not say what differs.
  const bool named = std::all_of(occasions.begin(), occasions.end(),
                                 [&](const Occasion& each) { return each.call == occasions[0].call; });
  std::vector<Occasion> told;
  std::string text;
  for (const Occasion& each : occasions) {
    if (std::find(told.begin(), told.end(), each) != told.end()) continue;
    std::vector<int> alike;
    for (size_t i = 0; i < ranks.size(); ++i) {
      if (occasions[i] == each) alike.push_back(ranks[i]);
    }
    text += told.empty() ? "" : told.size() == 1 ? " while " : " and ";
    text += "rank " + ranks_text(alike) + " " + does(each, alike.size() > 1, told.empty(), named);
    told.push_back(each);
  }
  return fail(twCallMismatch,
              "{}; all ranks of a comm must create, grow, shrink and destroy its groups, and meet in them, in the same "
              "order",
              text);
}

bool Opening::anybody_elsewhere(const std::vector<Parcel>& come) const {
  return std::any_of(come.begin(), come.end(), [&](const Parcel& parcel) {
    return parcel.bytes.size() >= kHeaderBytes && unpack(parcel.bytes) != own_;
  });
}

std::vector<Presence> Opening::exchange(std::span<const int> members, uint64_t tag, const Parcel& mine,
                                        TimePoint deadline, std::vector<Parcel>* all, const Left& left, Needs needs) {
  bool over = false;
  int asked = comm_.size();  // the member asked about last; exchange() asks about each again and again
  const auto ended = [&](int member) {
    if (ends_ && member <= asked) over = over || anybody_elsewhere(*all);
    asked = member;
    return over || (left && left(member)) || (left_ && left_(member));
  };
  std::vector<Presence> presence =
      comm_.exchange(members, tag, {pack(own_) + mine.bytes, {}}, deadline, all, ended, needs);
  here_.clear();
  occasions_.assign(members.size(), {});
  for (size_t i = 0; i < members.size(); ++i) {
    if (presence[i] != Presence::kHere) continue;
    std::string& bytes = (*all)[i].bytes;
    occasions_[i] = unpack(bytes);
    bytes.erase(0, kHeaderBytes);
    here_.push_back(static_cast<int>(i));
  }
  members_.assign(members.begin(), members.end());
  return presence;
}

void Opening::give(std::span<const int> members, uint64_t tag, const std::string& bytes) {
  comm_.give(members, tag, pack(own_) + bytes);
}

Status Opening::mismatch(const Occasion* allowed) const {
  std::vector<int> ranks;
  std::vector<Occasion> occasions;
  bool alike = true;
  for (const int i : here_) {
    ranks.push_back(members_[i]);
    occasions.push_back(occasions_[i]);
    alike = alike && (occasions_[i] == own_ || (allowed != nullptr && occasions_[i] == *allowed));
  }
  return alike ? Status{} : call_mismatch(ranks, occasions);
}

}  // namespace tw
