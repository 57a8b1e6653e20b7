// A group: its configuration, ranks and map of a window; its handles and requests; its error. What it shares with the
// other groups of that window is its arena's. Below it are the
// functions of the exchange on the host, which src/api calls with checked arguments: group.cc, shrink.cc, calls.cc and
// collectives.cc implement them.
//
// The error is the first one and stays (S6); `number` and `members` must be alike on all ranks, or calls outside of
// steps do not meet.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <unordered_set>
#include <vector>

#include "core/arena.h"
#include "core/comm.h"
#include "core/config.h"
#include "core/handle.h"
#include "core/leases.h"
#include "core/make_backend.h"
#include "core/moving.h"
#include "core/occasion.h"

namespace tw {

// A send_only gather or reduce that is not completed yet.
struct Request {
  CollectiveCall call;
  bool finished = false;  // by a step that followed on its channel
  Status status;          // how it ended, once it is finished
};

}  // namespace tw

struct twGroup : tw::Quarantined<twGroup> {
  // `called`: its number. `in`: whose window it is placed in; NULL: it makes one of its own.
  twGroup(twComm* on, tw::GroupConfig checked, std::vector<int> ranks, int32_t rank, uint64_t called,
          std::shared_ptr<tw::Arena> in);
  ~twGroup();
  twGroup(const twGroup&) = delete;
  twGroup& operator=(const twGroup&) = delete;

  twComm* comm;
  tw::GroupConfig config;
  std::vector<int> members;  // ranks of the comm
  const uint64_t number;     // names it among the groups of the comm: the tags that it was created at
  const std::shared_ptr<tw::Arena> arena;
  std::vector<tw::ExpertMap> maps;     // [layers], none without a placement
  std::unique_ptr<tw::Moving> moving;  // NULL: maps do not move
  std::vector<uint8_t> lost;           // [layers, P] by core/survivors.h; empty: nothing was lost
  tw::Context context;
  std::unique_ptr<tw::Backend> backend;
  tw::Channels& channels;  // the arena's
  uint64_t handle_bytes;   // bytes of a block for a handle
  std::unordered_set<twHandle*> handles;
  std::map<int64_t, tw::Request> requests;  // send_only gathers and reduces that the caller has not completed
  int64_t last_request = 0;
  tw::Occupied occupied;  // by calls that may come from any thread; the others take the arena's turn
  // Held while the sizes change (a growth's last moment), and shared by calls from any thread that read them.
  std::shared_mutex sizes;
  std::shared_ptr<tw::LeaseArea> leases;  // NULL: there are none. A lease keeps it

  int32_t me() const { return context.me; }
  int32_t ranks() const { return static_cast<int32_t>(members.size()); }
  // The rank in the group of a member.
  int rank_of(int member) const;
  // Whether a rank has said that it takes no part in ending or shrinking the group.
  bool has_left(int rank) {
    const tw::AbortSignal signal = backend->abort_of(rank);
    return signal.left || signal.went_on;
  }
  const tw::Shape& shape() const { return context.map.shape(); }

  // Does what tw::place_arrays does, for a handle of this group.
  uint64_t place_arrays(std::byte* block, tw::HandleArrays* arrays) const;
  // Whether other groups of this rank share its window.
  bool shares() const { return arena->groups.size() > 1; }
  // Takes over a larger configuration. Handles that there are keep their blocks and sizes.
  void grow(const tw::GroupConfig& larger);
  // Takes memory from the configuration's allocator; 64-byte aligned, NULL if there is none.
  std::byte* allocate(size_t bytes);
  void release(std::byte* block);
  // Takes a handle's block. Blocks of one size are alike, so those of destroyed handles are used again.
  std::byte* take_block();
  void give_block(const twHandle& handle);

  tw::ErrorRecord error();
  void set_error(tw::ErrorRecord record);
  bool is_sticky();

 private:
  std::vector<std::byte*> free_blocks_;
  std::mutex error_mutex_;  // twGroupGetError may come from any thread
  tw::ErrorRecord error_ = tw::empty_record();
};

namespace tw {

// Creates a group. Collective. `readable`: whether `given` could be read at all; a rank where it could not still tells
// the others. `members` are the comm's ranks that take part, ascending; `tags` come from twComm::next_tags. `occasion`:
// the call that this is a part of; `left`: members whose opening parcel is not waited for; `least`: as in check_config.
Status create_group(twComm* comm, const twGroupConfig_t& given, const Status& readable, std::vector<int> members,
                    uint64_t tags, std::unique_ptr<twGroup>* group, Occasion occasion = {}, const Left& left = {},
                    const Room& least = {});

// Parts of creation that growth has too. check_memory fails if a rank's free memory does not suffice for a window of
// which it has `there` bytes already, and for what it needs beside it between hosts. make_init: what a backend is made
// with; it refers to the group.
Status check_memory(const twComm& comm, const GroupConfig& config, const std::vector<int>& members, uint64_t there);
BackendInit make_init(const twComm& comm, const twGroup& group, uint64_t tag, TimePoint deadline);

// Destroys a group. Collective, with a bounded barrier unless the group is sticky. Where it returns an error, the group
// is gone all the same.
Status destroy_group(std::unique_ptr<twGroup> group);

// Shrinks a group. Collective among survivors: see twGroupShrink.
Status shrink_group(twGroup& group, const twGroupConfig_t* given, const Status& readable,
                    std::unique_ptr<twGroup>* survivors);

// Grows a group. Collective: see twGroupReserve. `given`: what is asked for; `readable`: as in create_group.
Status grow_group(twGroup& group, const twReserve_t& given, const Status& readable);

// Has the ranks of a group tell each other bytes. Collective: see twGroupMeet. `readable`: as in create_group. all: N
// times as many.
Status meet_in_group(twGroup& group, std::span<const std::byte> mine, const Status& readable, int32_t timeout_ms,
                     std::byte* all);

// Takes over what steps on a device have found out. Never blocks.
void poll_device(twGroup& group);

// Fails once the group is finished, by its own error or by a peer's abort signal (S6). Every call begins with it.
Status check_usable(twGroup& group, twPhase_t phase);

// Ends a call in which the group's ranks have met between steps, with what came of it: of an interrupt this tells the
// others, which may wait at these tags, and a death is the group's error if it has one by now.
Status end_meeting(twGroup& group, uint64_t tags, Status met);

// Makes an error of the group, tells the peers, and returns it as a sentence.
Status finish_group(twGroup& group, ErrorRecord record);

// Gives the group up on behalf of this rank.
void abort_group(twGroup& group);

// Gives the group up where the caller has ended a wait in a step, for rank `peer` if that is one. Returns
// twInterrupted, with a sentence.
Status interrupt_group(twGroup& group, twPhase_t phase, StepPlace at, int32_t peer);
// Gives the group up if `status` says that the caller has ended a wait; returns it.
Status heed_interrupt(twGroup& group, Status status);

// Tells ranks that shrink the group not to wait for this one: it will not come, or (went_on) is in a new group that
// they are not in. An error that it has announced stays.
void leave_group(twGroup& group, bool went_on = false);

// The exchange; arguments have been checked. `channel` is the caller's wish, -1 for the next free one; call->at becomes
// the place of the step, channel -1 if none was begun.
Status dispatch(twGroup& group, twHandle& handle, DispatchCall* call, int32_t channel, bool send_only);
Status combine(twGroup& group, twHandle& handle, CombineCall call, bool send_only);
// The exchange of counts. `leases`: those that the call's receive offsets lie in.
Status exchange_counts(twGroup& group, twHandle& handle, const CountsCall& call, int32_t channel,
                       std::vector<std::byte*> leases);
// Lets go of the leases that were announced for a handle: none of its dispatches will write to them.
void part_leases(twGroup& group, twHandle& handle);
// Makes the host know the counts of an exchange; it may have to wait for the device.
Status learn_counts(twGroup& group, twHandle& handle);
// How many rows of an exact layout the outputs of a dispatch have: what comes, if the host knows it, else what there is
// room for.
int64_t shown_rows(const twGroup& group, const twHandle& handle, const Layout& layout, bool sized);
// Tells whether twComplete would not wait for a send_only exchange of counts. Waits for that, timeout_ms at most, -1:
// as long as twComplete would. Changes nothing, so that ranks may ask when and as often as they like (S5).
Status counts_ready(twGroup& group, twHandle& handle, int32_t timeout_ms, bool* ready);
Status complete(twGroup& group, twHandle& handle, void* stream);
// Refuses a call whose arguments failed the check: peers are told at once, instead of waiting. Returns `why`. `bound`:
// the call's, 0 for its default, -1 where it is what is wrong. `map`: that of the call's rows, as staged transport
// moves as much as the peers.
Status refuse_dispatch(twGroup& group, twHandle* handle, int32_t channel, bool send_only, int32_t bound,
                       const WindowMap& map, void* stream, Status why);
Status refuse_counts(twGroup& group, twHandle* handle, int32_t channel, bool send_only, void* stream, Status why);
Status refuse_combine(twGroup& group, twHandle& handle, const CombineRows& sent, void* stream, Status why);
// Does for a combine what the peers' hosts do, where this rank has refused the handle's dispatch, and devices make no
// step: moves what they move over a carrier, and gives the handle's channel back.
void keep_pace(twGroup& group, twHandle& handle, const CombineRows& sent, void* stream);
// Gathers and reduces (collectives.cc). call->at becomes the place of the step, channel -1 if none was begun; *request
// is set by a send_only call.
Status collect(twGroup& group, CollectiveCall* call, int32_t channel, int64_t* request);
Status complete_request(twGroup& group, int64_t request, void* stream);
// Refuses a gather or reduce. `call`: filled as far as its arguments were good.
Status refuse_collective(twGroup& group, twPhase_t phase, bool views, const CollectiveCall& call, int32_t channel,
                         void* stream, Status why);
// Whether an address in this rank's window belongs to the last step that its channel has made.
bool window_is_alive(twGroup& group, const void* address);
// Whether a view of the handle's dispatch is still good: no later step has begun on its channel.
bool view_is_alive(twGroup& group, const twHandle& handle);
// Gives the handle's channel back.
Status release_channel(twGroup& group, twHandle& handle);

}  // namespace tw
