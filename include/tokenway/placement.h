// Experts with replicas: which physical expert holds which expert, which of them serves a choice, and how often experts
// are chosen. Included by tokenway.h, which has the conventions.
//
// The ids that a caller gives are logical: 0..E-1. Behind twHandleCreate everything speaks of physical experts (slots),
// 0..P-1, each a place for one expert's weights on one rank. Slots lie where config.expert_rank and expert_slot put
// them, which then have P elements; by default in contiguous blocks, where the first P mod N ranks hold one more. A map
// says which expert each slot holds. Received ids are slots too: of this rank (twIdLocal), or of all (twIdGlobal);
// slot_expert of a slot is the expert. The choices of one token are of different experts, so of different slots;
// weights stay with them.
//
// A group has a map for each of its layers, as a model's layers share a group. Ranks must have the same maps when slots
// are chosen: when a handle is created or updated, and on the CUDA backend in its first dispatch. A dispatch (in high
// throughput the exchange of counts) for which maps, layers or counting differed between ranks is twBoundMismatch on
// all of them. So a map is replaced between the same two routings on all ranks.
#ifndef TOKENWAY_PLACEMENT_H_
#define TOKENWAY_PLACEMENT_H_

#define TW_MAX_LAYERS 4096

// The policy: which of an expert's R slots serves a choice of this rank's t-th token. Each policy is a function of the
// arguments named, so that it is the same on every backend.
typedef enum TW_AS_INT {
  // The slots serve in ascending order, in turn: slot (rank + t) mod R.
  twReplicaRoundRobin = 0,
  // If this rank holds some of the slots, only these serve, in turn; else as above.
  twReplicaLocalFirst = 1,
  // Slots serve by their shares. A point of [0, 1) follows from rank, t and expert, and is spread evenly over t; the
  // slot serves in whose interval the point lies.
  twReplicaShares = 2,
  // Slots serve so that the ranks' loads are levelled best by the counts of this rank's batch, in two rounds over the
  // experts that have several slots (src/exchange/replicas.h). No other rank is asked.
  twReplicaBalanced = 3,
} twReplicaPolicy_t;

// Replicas, maps and counting of a group: config.placement. Equal on every rank.
typedef struct {
  size_t size;
  int32_t num_layers;          // 1..TW_MAX_LAYERS, with num_layers * P at most 2^24; 0: 1
  int32_t num_slots;           // P, from E to TW_MAX_EXPERTS; 0: E
  const int32_t* slot_expert;  // [num_layers, P] the expert in each slot, -1: none; every expert in at least one.
                               // Copied. NULL: slot i holds expert i mod E
  const float* slot_shares;    // [num_layers, P], for twReplicaShares: the share of its expert's choices that a slot is
                               // to serve, in any unit, at least 0, and in sum more than 0 for each expert. Copied.
                               // NULL: alike
  twReplicaPolicy_t policy;
  int32_t count_loads;    // 1: dispatches count, and tell all ranks (twGroupLoads)
  float load_decay;       // what is left of older dispatches' counts after one more dispatch, 0 <= d < 1
  uint64_t weight_bytes;  // bytes of each rank's window for weights that peers may read (twGroupPull); 0: none
  int32_t moves;          // 1: layers get new maps while steps run (moving.h); needs count_loads
} twPlacement_t;
#define TW_PLACEMENT_INIT {sizeof(twPlacement_t), 1, 0, NULL, NULL, twReplicaRoundRobin, 0, 0.99f, 0, 0}

// Does what twHandleCreate does, for a layer: 0..num_layers-1. twHandleCreate is for layer 0; twHandleUpdate keeps the
// layer. A handle keeps the slots that its routing got. On the CPU it gets them here, on the CUDA backend in its first
// dispatch (in high throughput the exchange of counts), by the map that is there in stream order; in a captured graph,
// by the map at each replay. In a group whose maps move a handle gets its slots in its first dispatch or exchange of
// counts on the CPU too.
TW_API twResult_t twHandleCreateForLayer(twHandle_t* handle, twGroup_t group, int32_t layer, const twTensor_t* ids,
                                         const twTensor_t* weights, void* memory);

// Replaces a layer's map, and for twReplicaShares its shares; [P] each, slot_shares NULL: alike. Not collective, but
// all ranks must do it at the same place in their order of calls. It does not change where slots are, and moves no
// weights: whoever replaces a map has moved them. On the CUDA backend the call waits for the device, or, where ranks
// are threads of a process, for the streams that calls of this group have used; none of these may be captured
// meanwhile. Replays of captured graphs follow the new map. Errors: twInvalidArgument, twInvalidUsage for a group
// without config.placement or one whose maps move, and the sticky ones.
TW_API twResult_t twGroupReplaceMap(twGroup_t group, int32_t layer, const int32_t* slot_expert,
                                    const float* slot_shares, void* stream);

// Gives a layer's map as it is, where maps move as far as all lanes of this rank have it, and its shares (all 1 if none
// were given): [P]; NULL: not wanted. Errors: those of twGroupReplaceMap that are about arguments.
TW_API twResult_t twGroupMap(twGroup_t group, int32_t layer, int32_t* slot_expert, float* slot_shares);

// Gives the load statistics: how often each expert has been chosen. loads: [num_layers, E], the decaying average of the
// choices of all ranks in a dispatch of that layer,
//   load = load_decay * load + (1 - load_decay) * choices, from 0 on, in float32,
//
// over the layer's dispatches on all lanes, in the order of calls. dispatches: [num_layers], how many of them are in
// it, or NULL. On the CUDA backend the last dispatch of each lane is not in it yet: the next one on the lane takes what
// it has told. The call waits neither for calls of other ranks nor for the device; ranks that have made the same steps,
// and whose devices have done them, read the same. A choice counts even if its row is dropped for lack of room. A
// dispatch with input.uncounted does not count; nor does one that a rank has refused; nor one that failed, except for a
// bound or map that differs on the CUDA backend. Errors: twInvalidUsage without count_loads.
TW_API twResult_t twGroupLoads(twGroup_t group, float* loads, int64_t* dispatches);

#endif  // TOKENWAY_PLACEMENT_H_
