// Arena: what groups that share one window have in common (config.arena): its lanes with their steps and signals, its
// places, and what ends all of them at once. A group that was made without another's window has an arena of its own.
//
// What must hold: the steps of all groups of an arena form one sequence on each channel (S1, S2), so there is one
// Channels for all, and one call at a time (S5). A group with a step counter of its own would write a bank that a slow
// rank still reads for another group.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <vector>

#include "core/channels.h"
#include "core/config.h"
#include "core/leases.h"
#include "core/occupied.h"
#include "core/record.h"

struct twGroup;

namespace tw {

struct Arena {
  Arena(uint64_t called, const GroupConfig& config)
      : number(called), channels(config.given.lanes, config.first_step), map(config.map), room(config.room) {}

  const uint64_t number;              // names it among those of the comm: the number of its first group
  Channels channels;                  // of all its groups
  Occupied occupied;                  // taken by every call of any group, but those that may come from any thread
  std::vector<twGroup*> groups;       // those that live
  twGroup* first = nullptr;           // which made the window, and may make it larger; NULL once it is destroyed
  WindowMap map;                      // that group's, as it has grown
  std::vector<WindowMap> former;      // and before
  Room room;                          // of that map
  std::atomic<bool> gave_up = false;  // by twGroupAbort
  bool excluded = false;              // found by a shrink: the peers go on without this rank, or nobody goes on
  uint64_t shrunk = 0;                // number of the group that was shrunk; 0: none was
  std::shared_ptr<LeaseArea> leases;  // the first group's
  std::vector<std::byte*> parted;     // leases to which a step that this rank refused may still write

  // The error that finished all groups, which twGroupGetError may ask for from any thread.
  bool is_sticky();
  ErrorRecord error();
  void finish(ErrorRecord record);

 private:
  std::mutex error_mutex_;
  ErrorRecord error_ = empty_record();
};

// Places a group in an arena: makes config->map one of the arena's window. Fails, with what is missing, where that has
// too little room. Called before the group is one of the arena's.
Status place_in(const Arena& arena, GroupConfig* config);

// Whether nothing is under way on any lane of an arena: no send_only call that is not completed. call: for the
// sentence.
Status check_settled(Arena& arena, const char* call);

// Ends what a group has under way on lanes that other groups go on with, and gives its lanes back: S2 wants that before
// the next step there. May wait for the peers, which have all begun those steps.
void end_steps(twGroup& group);

}  // namespace tw
