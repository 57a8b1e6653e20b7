// What is to be balanced: the loads of one layer's experts over slots of ranks.
//
// Loads are whole numbers here: a layer's are scaled by a power of two, so that its total has about 52 bits, and
// rounded. All that the planner decides, it decides by comparing such numbers, with fixed tie-breaks (the lower rank,
// the lower expert), so that the same loads give the same plan on every machine and with every compiler.
#pragma once

#include <cstdint>
#include <vector>

namespace tw::balance {

using Units = int64_t;

// Of all layers. Rank r lies on node r / (ranks / nodes), expert e belongs to group e / (experts / groups).
struct Shape {
  int32_t experts;  // E
  int32_t ranks;    // N
  int32_t slots;    // of a rank, S
  int32_t nodes;    // divides ranks
  int32_t groups;   // of experts that stay on one node; 0: placement does not look at nodes

  int32_t places() const { return ranks * slots; }
  int32_t ranks_per_node() const { return ranks / nodes; }
  int32_t node_of(int32_t rank) const { return rank / ranks_per_node(); }
};

// One layer.
struct Problem {
  Shape shape;
  std::vector<Units> loads;  // [E], none negative
  Units total = 0;           // their sum

  // Rounded up: no plan's hottest rank carries less.
  Units mean() const { return (total + shape.ranks - 1) / shape.ranks; }
};

// What an expert's every replica carries. Rounded up, so that a rank never looks cooler than it is.
inline Units share(Units load, int32_t replicas) { return (load + replicas - 1) / replicas; }

}  // namespace tw::balance
