// Experts in more than one place: which slots hold which expert, which of them serves a choice, and how much experts
// are chosen. Included by tokenway.h, which has the conventions.
//
// The ids that a caller gives are logical: 0..E-1. Behind twHandleCreate everything speaks of physical slots: 0..P-1,
// each a place for one expert's weights on one rank. Slots are where config.expert_rank and expert_slot put them, which
// then have P elements; by default in contiguous blocks, the first P mod N ranks with one more. A map says which expert
// each slot holds. Received ids are slots too: of this rank (twIdLocal), or of all (twIdGlobal); the expert is
// slot_expert of that. Choices of one token are of different experts, so of different slots; weights stay with them.
//
// A group has a map for each of its layers, as a model's layers share a group. Ranks must have the same maps when slots
// are chosen, which is when a handle is created or updated, and on the CUDA backend in its first dispatch: a dispatch
// (in high throughput the exchange of counts) for which maps, layers or counting differed between ranks is
// twBoundMismatch on all of them. So a map is replaced between the same two routings on all ranks.
#ifndef TOKENWAY_PLACEMENT_H_
#define TOKENWAY_PLACEMENT_H_

#define TW_MAX_LAYERS 4096

// Which of an expert's slots serves a choice, of this rank's t-th token. Each is a function of the arguments named, so
// that it is the same on every backend.
typedef enum TW_AS_INT {
  // The slots in ascending order, in turn: slot (rank + t) mod R of R.
  twReplicaRoundRobin = 0,
  // Where this rank holds some of the slots, these alone in turn; else as above.
  twReplicaLocalFirst = 1,
  // Slots by their shares: the one in whose interval of [0, 1) a point lies that follows from rank, t and expert and is
  // spread evenly over t.
  twReplicaShares = 2,
  // What levels the ranks' loads best by the counts of this rank's batch, in two rounds over the experts that have
  // several slots (src/exchange/replicas.h). Nothing is asked of other ranks.
  twReplicaBalanced = 3,
} twReplicaPolicy_t;

// The same on every rank.
typedef struct {
  size_t size;
  int32_t num_layers;          // 1..TW_MAX_LAYERS, with num_layers * P at most 2^24; 0: 1
  int32_t num_slots;           // P, from E to TW_MAX_EXPERTS; 0: E
  const int32_t* slot_expert;  // [num_layers, P] the expert in each slot, -1: none; every expert in at least one.
                               // Copied. NULL: slot i holds expert i mod E
  const float* slot_shares;    // [num_layers, P] of twReplicaShares: how much of its expert's choices a slot is to
                               // serve, in any unit, at least 0, and in sum more for each expert. Copied. NULL: alike
  twReplicaPolicy_t policy;
  int32_t count_loads;  // 1: dispatches count, and tell all ranks (twGroupLoads)
  float load_decay;     // what is left of older dispatches' counts after one more, 0 <= d < 1
} twPlacement_t;
#define TW_PLACEMENT_INIT {sizeof(twPlacement_t), 1, 0, NULL, NULL, twReplicaRoundRobin, 0, 0.99f}

// As twHandleCreate, of a layer: 0..num_layers-1. twHandleCreate is of layer 0; twHandleUpdate keeps the layer. A
// handle keeps the slots that its routing got: on the CPU here, on the CUDA backend in its first dispatch (in high
// throughput the exchange of counts), by the map that is there in stream order; in a captured graph, by the one at each
// replay.
TW_API twResult_t twHandleCreateForLayer(twHandle_t* handle, twGroup_t group, int32_t layer, const twTensor_t* ids,
                                         const twTensor_t* weights, void* memory);

// Replaces a layer's map, and of twReplicaShares its shares; [P] each, slot_shares NULL: alike. Not collective, but all
// ranks must do it at the same place in their order of calls. Where slots are does not change: whoever replaces a map
// has moved the weights. On the CUDA backend the call waits for the device, or, where ranks are threads of a process,
// for the streams that calls of this group have used; none of them may be captured meanwhile. Replays of captured
// graphs follow the new map. Errors: twInvalidArgument, twInvalidUsage for a group without config.placement, and the
// sticky ones.
TW_API twResult_t twGroupReplaceMap(twGroup_t group, int32_t layer, const int32_t* slot_expert,
                                    const float* slot_shares, void* stream);

// A layer's map as it is, and its shares (all 1 without any given): [P]; NULL: not wanted. Of the errors of
// twGroupReplaceMap those about arguments.
TW_API twResult_t twGroupMap(twGroup_t group, int32_t layer, int32_t* slot_expert, float* slot_shares);

// How often each expert has been chosen: loads [num_layers, E], the decaying average of the choices of all ranks in a
// dispatch of that layer,
//   load = load_decay * load + (1 - load_decay) * choices, from 0 on, in float32,
// over the layer's dispatches on all lanes, in the order of calls; dispatches: [num_layers], how many of them are in
// it, or NULL. On the CUDA backend the last dispatch of each lane is not in it yet: the next one on the lane takes what
// it has told. Neither a call of other ranks nor the device is waited for; ranks that have made the same steps, and
// whose devices have done them, read the same. A choice counts even if its row is dropped for lack of room. A dispatch
// with input.uncounted does not count, nor one that a rank has refused, nor, but for a bound or map that differs on the
// CUDA backend, one that failed. Errors: twInvalidUsage without count_loads.
TW_API twResult_t twGroupLoads(twGroup_t group, float* loads, int64_t* dispatches);

#endif  // TOKENWAY_PLACEMENT_H_
