// Renames the ranks of a new plan, so that as many slots as possible keep their expert: which rank of the plan becomes
// which rank of the cluster is an assignment problem. Takes a plan and the old one, gives the renamed plan. Loads do
// not change; the number of weights to copy does. The assignment is in whole numbers with fixed ties.
#include <algorithm>
#include <limits>
#include <utility>

#include "balance/update.h"

namespace tw::balance {
namespace {

// Finds the assignment of n rows to n columns with the largest sum of kept[row * n + column], as the column of each
// row: the Hungarian method with potentials, O(n^3) (Kuhn 1955, in the form of Jonker and Volgenant's shortest paths).
std::vector<int32_t> assign(int32_t n, const std::vector<int32_t>& kept) {
  constexpr int32_t kFar = std::numeric_limits<int32_t>::max() / 2;
  std::vector<int32_t> of_row(n + 1, 0), of_column(n + 1, 0), row_at(n + 1, 0), way(n + 1, 0);
  for (int32_t row = 1; row <= n; ++row) {
    std::vector<int32_t> least(n + 1, kFar);
    std::vector<char> used(n + 1, 0);
    int32_t column = 0;
    row_at[0] = row;
    do {
      used[column] = 1;
      const int32_t r = row_at[column];
      int32_t step = kFar, next = 0;
      for (int32_t c = 1; c <= n; ++c) {
        if (used[c]) continue;
        const int32_t cost = -kept[static_cast<size_t>(r - 1) * n + c - 1] - of_row[r] - of_column[c];
        if (cost < least[c]) {
          least[c] = cost;
          way[c] = column;
        }
        if (least[c] < step) {
          step = least[c];
          next = c;
        }
      }
      for (int32_t c = 0; c <= n; ++c) {
        if (used[c]) {
          of_row[row_at[c]] += step;
          of_column[c] -= step;
        } else {
          least[c] -= step;
        }
      }
      column = next;
    } while (row_at[column] != 0);
    for (; column != 0; column = way[column]) row_at[column] = row_at[way[column]];
  }
  std::vector<int32_t> columns(n);
  for (int32_t c = 1; c <= n; ++c) columns[row_at[c] - 1] = c - 1;
  return columns;
}

// How many slots rank b of `old` keeps if it gets what rank a of `plan` has.
int32_t common(const std::vector<int32_t>& plan, int32_t a, const std::vector<int32_t>& old, int32_t b, int32_t slots) {
  std::vector<int32_t> left(old.begin() + static_cast<int64_t>(b) * slots,
                            old.begin() + static_cast<int64_t>(b + 1) * slots);
  int32_t count = 0;
  for (int32_t i = a * slots; i < (a + 1) * slots; ++i) {
    const auto at = std::find(left.begin(), left.end(), plan[i]);
    if (at == left.end()) continue;
    *at = -1;
    ++count;
  }
  return count;
}

// What rank b holds after it got the experts of rank a: those that it had stay where they were, the others fill the
// rest, ascending.
void settle(const std::vector<int32_t>& plan, int32_t a, const std::vector<int32_t>& old, int32_t b, int32_t slots,
            std::vector<int32_t>* made) {
  std::vector<int32_t> coming(plan.begin() + static_cast<int64_t>(a) * slots,
                              plan.begin() + static_cast<int64_t>(a + 1) * slots);
  std::sort(coming.begin(), coming.end());
  for (int32_t i = b * slots; i < (b + 1) * slots; ++i) {
    const auto at = std::find(coming.begin(), coming.end(), old[i]);
    (*made)[i] = -1;
    if (at == coming.end()) continue;
    (*made)[i] = old[i];
    coming.erase(at);
  }
  auto next = coming.begin();
  for (int32_t i = b * slots; i < (b + 1) * slots; ++i) {
    if ((*made)[i] < 0) (*made)[i] = *next++;
  }
}

}  // namespace

std::vector<int32_t> relabel(const Shape& shape, const std::vector<int32_t>& plan, const std::vector<int32_t>& old) {
  // Without groups any rank may become any other; with groups all ranks of a node move together.
  const int32_t nodes = shape.groups > 0 ? shape.nodes : 1, ranks = shape.ranks / nodes;
  std::vector<std::vector<int32_t>> inside;  // [nodes * nodes]: the best assignment of ranks of one node to another's
  std::vector<int32_t> kept;
  for (int32_t a = 0; a < nodes; ++a) {
    for (int32_t b = 0; b < nodes; ++b) {
      std::vector<int32_t> same(static_cast<size_t>(ranks) * ranks);
      for (int32_t i = 0; i < ranks; ++i) {
        for (int32_t k = 0; k < ranks; ++k) {
          same[static_cast<size_t>(i) * ranks + k] = common(plan, a * ranks + i, old, b * ranks + k, shape.slots);
        }
      }
      inside.push_back(assign(ranks, same));
      int32_t sum = 0;
      for (int32_t i = 0; i < ranks; ++i) sum += same[static_cast<size_t>(i) * ranks + inside.back()[i]];
      kept.push_back(sum);
    }
  }
  const auto node = assign(nodes, kept);
  std::vector<int32_t> made(plan.size());
  for (int32_t a = 0; a < nodes; ++a) {
    const auto& to = inside[static_cast<size_t>(a) * nodes + node[a]];
    for (int32_t i = 0; i < ranks; ++i) settle(plan, a * ranks + i, old, node[a] * ranks + to[i], shape.slots, &made);
  }
  return made;
}

}  // namespace tw::balance
