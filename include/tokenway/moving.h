// Maps that move: layers that get new maps, and experts new places, while steps run. Included by tokenway.h, which has
// the conventions.
//
// twGroupReplaceMap wants all ranks to replace a map between the same two routings, and waits for the device. Here
// nobody waits, and ranks come when they like:
//
//   1. twGroupStageMap gives a layer's next map. Its number is the epoch: 1, 2, ... in the order of these calls, which
//      must be the same on all ranks, with the same maps.
//   2. The caller brings the weights that the map needs to this rank, into slots that no map in force uses
//      (twGroupPull, or its own way). Peers have filled theirs for the group's first maps when a dispatch has ended.
//   3. twGroupReady says that they are there, or that they will never be (failed).
//   4. Each dispatch tells all ranks up to which epoch its rank is ready. What all have told in one dispatch decides
//      the version of the lane, alike on all ranks, from its next dispatch on (on the CUDA backend from the one after).
//      A routing gets the map of the version that its lane has in its first step, a dispatch or an exchange of counts,
//      and keeps it. So that must be the same step on all ranks, and a routing whose first step a rank has refused is
//      to be made anew by all (twHandleUpdate). If one rank has failed, the layer keeps its map on all of them.
//   5. twGroupEpochs shows when all lanes have the epoch here, and when no handle of an older version is left. Then
//      nothing uses the weights that the former map had, beside what was launched before: the slots may be filled again
//      behind that, in the order of all streams on which steps and experts ran.
//
// A lane that makes no dispatch keeps its version, and holds the epochs of all of them open: one of no tokens, with
// input.uncounted, is enough. Captured graphs follow the version at each replay.
//
// When a rank dies, the others shrink the group (twGroupShrink). Unless the configuration gives maps (it gives none if
// it is NULL, or has placement->moves 1, slot_expert NULL and no expert_rank), they begin with those in force by the
// latest version that a lane of any survivor has: who has it knows that all copies for it were whole, and may have
// filled again what it freed. Epochs that are open beyond it come to nothing; the new group counts its own from 1.
// - Survivors' slots keep their places, and are numbered by rank and place.
// - An expert that was on dead ranks alone is lost. It gets an empty slot of the rank that has most of them in the
//   layer; each rank keeps one empty. Where there are too few, all ranks get as many slots more as that takes, behind
//   their own, and as much more memory for weights, in proportion. twGroupLost names the slots. Their weights are to be
//   loaded before the first dispatch.
// - The memory for weights is the new group's own, and zero. Each rank copies what it had from the old group's, which
//   is there until that group is destroyed: no other rank is asked. This rank's pulls must have ended.
#ifndef TOKENWAY_MOVING_H_
#define TOKENWAY_MOVING_H_

// Gives the next map of a layer, and for twReplicaShares its shares; [P] each, slot_shares NULL: alike. *epoch is its
// number. Sends nothing, and waits for nothing: on the CUDA backend the map goes to the device on a stream of the
// group. Errors: twInvalidArgument; twInvalidUsage for a group without config.placement->moves, while the layer's epoch
// before is open on a lane of this rank, or while 15 epochs are; and the sticky ones.
TW_API twResult_t twGroupStageMap(twGroup_t group, int32_t layer, const int32_t* slot_expert, const float* slot_shares,
                                  uint32_t* epoch);

// Says that this rank has what `epoch` needs, or failed = 1: that it will never have it. In the order of epochs, each
// once. Sends nothing: the next dispatch on each lane tells it. Errors: twInvalidArgument, twInvalidUsage as
// twGroupStageMap, and the sticky ones.
TW_API twResult_t twGroupReady(twGroup_t group, uint32_t epoch, int32_t failed);

// How far epochs have come on this rank. Numbers wrap at 2^32.
typedef struct {
  size_t size;
  uint32_t staged;  // the last epoch of twGroupStageMap; 0: none
  uint32_t ready;   // the last of twGroupReady
  uint32_t agreed;  // the least version of this rank's lanes: epochs up to it are decided, and no longer open
  uint32_t voids;   // bit i: the epoch agreed - i was void, so that its layer has kept its map
  uint32_t oldest;  // the least version that a handle may have which is neither destroyed nor updated; `agreed` if
                    // there is none. Handles whose first step was captured do not count: they get a map in each replay
} twEpochs_t;

// Shows it, and in lanes, [config.lanes] or NULL, the version of each lane. Waits for nobody: on the CUDA backend it is
// what the device has told so far. Errors: twInvalidUsage as twGroupStageMap.
TW_API twResult_t twGroupEpochs(twGroup_t group, twEpochs_t* epochs, uint32_t* lanes);

// Tells which slots of a layer have experts that were lost in the shrink which made the group: [P], 1 for those. They
// stay so. Errors: twInvalidArgument; twInvalidUsage as twGroupStageMap.
TW_API twResult_t twGroupLost(twGroup_t group, int32_t layer, int32_t* slot_lost);

// Gives the memory for weights of a rank, config.placement->weight_bytes in whole pages, zero at first: this rank's
// own, which its caller reads and writes as it likes, or a peer's, which is to be read only; device memory on the CUDA
// backend. It is there until the group ends. Where ranks have no memory in common, as over a carrier or between hosts,
// a peer's is NULL. From any thread, beside the calls of the group. Errors: twInvalidArgument; twInvalidUsage where
// weight_bytes is 0.
TW_API twResult_t twGroupWeights(twGroup_t group, int32_t rank, void** memory, uint64_t* bytes);

// Copies `bytes` from offset `from` of a rank's memory for weights to offset `to` of this rank's own. On the CUDA
// backend by a copy engine, on `stream`, in whose order it is; it takes no SM, and waits for nothing else. On the CPU
// it is done when the call returns. Whether what is there is whole, and nobody uses what is overwritten, is the
// caller's affair (twGroupEpochs). Copies must have ended on all ranks before one of them ends the group. From any
// thread, beside the calls of the group. Errors: twInvalidArgument; twInvalidUsage as twGroupWeights; twUnsupported
// where ranks have no memory in common, behind all other checks: who has weights brought otherwise may ask here first.
TW_API twResult_t twGroupPull(twGroup_t group, int32_t rank, uint64_t from, uint64_t to, uint64_t bytes, void* stream);

// For who brings weights otherwise: what ranks have to tell each other before, as where each serves its own. Gives
// `bytes` bytes of each rank to all, up to 65536 of each and equally many: [N * bytes], those of rank 0 first. mine,
// all: memory of the host; with bytes 0 they may be NULL, and ranks meet all the same. timeout_ms: how long it waits
// for the others; 0: the group's timeout. Collective over the group, on any backend, between steps: it is one of the
// calls of a comm that ranks make in the same order (twGroupCreate). It waits for no device, and is for no hot path.
//
// Errors: twInvalidArgument, which all ranks return where one is given what it cannot take; twConfigMismatch where
// `bytes` differ; twTimeout and twPeerDied where a rank does not come; and twCallMismatch, at once, where another rank
// creates, grows, shrinks or destroys a group of the comm instead. They leave the group as it was. Each rank counts
// that as one call: one that comes when the others have given up hears it from them, and the next call of all meets.
TW_API twResult_t twGroupMeet(twGroup_t group, const void* mine, uint64_t bytes, int32_t timeout_ms, void* all);

// Tells the IP address by which ranks of the group on other hosts reach this one; where there are none, that of
// localhost. The string is valid until the thread's next call of this function. From any thread, beside the calls of
// the group. Errors: twInvalidArgument.
TW_API twResult_t twGroupAddress(twGroup_t group, const char** address);

#endif  // TOKENWAY_MOVING_H_
