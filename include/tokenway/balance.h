// Plans where experts go: they even out what ranks carry, by replicas of hot experts and by placement. Included by
// tokenway.h, which has the conventions.
//
// A layer has E logical experts and P = num_ranks * slots_per_rank physical experts (slots), P >= E. Slot p is local
// slot p % slots_per_rank of rank p / slots_per_rank. A plan says which expert each slot holds, so that every expert
// has at least one. An expert's load is split evenly over its replicas.
//
// All calls run on the host, are synchronous, need no comm, and may be made by several threads at once. The same
// arguments give the same plan on every rank and machine: loads become whole numbers (52 bits a layer), which are
// compared with fixed tie-breaks. Where a rank has two slots, doubles guide the search, rounded to nearest as IEEE 754
// has it.
#ifndef TOKENWAY_BALANCE_H_
#define TOKENWAY_BALANCE_H_

// What the calls of this header take: the sizes of the layers, and how to plan.
typedef struct {
  size_t size;
  int32_t num_layers;      // >= 0
  int32_t num_experts;     // E, 1..TW_MAX_EXPERTS
  int32_t num_ranks;       // N, 1..TW_MAX_RANKS
  int32_t slots_per_rank;  // S, >= 1; N * S is E..TW_MAX_EXPERTS
  int32_t num_nodes;       // divides N; rank r is on node r / (N / num_nodes)
  // Groups of E / num_groups consecutive experts that a router chooses together (group-limited gating). 0: nodes are
  // ignored. Else a multiple of num_nodes that divides E: each group has a home node, and its load leaves that node
  // only as far as node_tolerance demands.
  int32_t num_groups;
  double node_tolerance;  // 0..1: by how much of the mean a node may exceed it; 1 or more: nothing leaves its home
  // A plan that is in use and is to be updated: at most max_writes slots of a layer get another expert (each such write
  // is a copy of an expert's weights). max_writes -1: half a slot per rank, at least 4. N * S or more: a new plan,
  // whose ranks are renamed so that as many slots as possible stay as they are. old_map NULL: a plan from nothing.
  const int32_t* old_map;  // [num_layers, N * S] physical to logical
  int32_t max_writes;
} twPlanConfig_t;
#define TW_PLAN_CONFIG_INIT {sizeof(twPlanConfig_t), 0, 0, 0, 0, 1, 0, 0.01, NULL, -1}

// What twPlan writes, into memory of the caller. NULL: not wanted.
typedef struct {
  size_t size;
  int32_t* physical_to_logical;  // [num_layers, N * S]; not NULL
  int32_t* replicas;             // [num_layers, E] how many slots each expert has
  double* rank_loads;            // [num_layers, N] what each rank carries, in the unit of the loads
  double* bounds;  // [num_layers] packing bound: no plan's hottest rank carries less (proven in src/balance/bound.cc)
  double* stray;   // [num_layers] the part of the load that is on another node than its group's home; 0 without groups
} twPlanOutput_t;
#define TW_PLAN_OUTPUT_INIT {sizeof(twPlanOutput_t), NULL, NULL, NULL, NULL, NULL}

// Plans all layers. loads: [num_layers, E] twFloat32, twFloat64, twInt32 or twInt64 in host memory, of any strides, in
// tokens or anything proportional; zero is allowed. No rank holds an expert twice unless slots_per_rank > E, or old_map
// has it so and max_writes is too small to mend that. Errors: twInvalidArgument, which names the layer and expert of a
// load that is NaN, infinite or negative, or the layer whose loads add up to more than a double holds.
TW_API twResult_t twPlan(const twPlanConfig_t* config, const twTensor_t* loads, const twPlanOutput_t* output);

// Computes what ranks would carry under any map, in use or planned: rank_loads [num_layers, N], from map [num_layers, N
// * S]. config.old_map, max_writes, num_groups and node_tolerance are ignored. Errors: as twPlan.
TW_API twResult_t twPlanLoads(const twPlanConfig_t* config, const twTensor_t* loads, const int32_t* map,
                              double* rank_loads);

// Lists the slots of each logical expert, ascending. replicas: [num_layers, E] how many (NULL: not wanted). slots:
// [num_layers, E, width], filled up with -1 (NULL: not wanted). Errors: twInvalidArgument, also for an expert with more
// than `width` slots.
TW_API twResult_t twPlanSlots(const twPlanConfig_t* config, const int32_t* map, int32_t* replicas, int32_t* slots,
                              int32_t width);

// One copy of weights: `slot` gets another expert, and `source` is a slot that held that expert before. The source is
// on the same rank if there is such a slot, else on the same node, else elsewhere. Among several it is the one from
// which fewest moves copy, and the lower of equals. Sources are slots of the old map, which may get another expert
// themselves: read all of them before any is written, or keep copies.
typedef struct {
  int32_t layer;
  int32_t slot;
  int32_t expert;
  int32_t before;  // what the slot held
  int32_t source;  // slot
} twPlanMove_t;

// Lists what changes between two maps [num_layers, N * S], by layer and slot. Writes at most `room` moves (NULL with
// room 0), and to *count how many there are. Errors: twInvalidArgument.
TW_API twResult_t twPlanMoves(const twPlanConfig_t* config, const int32_t* old_map, const int32_t* new_map,
                              twPlanMove_t* moves, int64_t room, int64_t* count);

#endif  // TOKENWAY_BALANCE_H_
