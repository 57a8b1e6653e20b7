// The problem of balancing: the loads of one layer's experts over slots of ranks. Shape has what all layers share,
// Problem a layer's loads.
//
// A Load is a whole number: a layer's loads are scaled by a power of two, so that their total has about 52 bits, and
// rounded. The planner decides everything by comparing such numbers, with fixed tie-breaks (the lower rank, the
// lower expert), so that the same loads give the same plan on every machine and with every compiler. Rounding is always
// up: a rank never looks cooler than it is.
#pragma once

#include <cstdint>
#include <vector>

namespace tw::balance {

using Load = int64_t;

// What all layers share. Rank r lies on node r / (ranks / nodes), expert e belongs to group e / (experts / groups).
struct Shape {
  int32_t experts;  // E
  int32_t ranks;    // N
  int32_t slots;    // S: slots of a rank
  int32_t nodes;    // divides ranks
  int32_t groups;   // groups of experts that stay on one node; 0: placement does not look at nodes

  int32_t places() const { return ranks * slots; }
  int32_t ranks_per_node() const { return ranks / nodes; }
  int32_t node_of(int32_t rank) const { return rank / ranks_per_node(); }
};

// One layer.
struct Problem {
  Shape shape;
  std::vector<Load> loads;  // [E], none negative
  Load total = 0;           // their sum

  // The mean, rounded up: no plan's hottest rank carries less.
  Load mean() const { return (total + shape.ranks - 1) / shape.ranks; }
};

// What each replica of an expert carries, rounded up.
inline Load share(Load load, int32_t replicas) { return (load + replicas - 1) / replicas; }

}  // namespace tw::balance
