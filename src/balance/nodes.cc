// Placement that looks at nodes: groups of experts have a home node, so that a token routed to few groups travels to
// few nodes. Load leaves its home only where a node would otherwise carry too much, and then as little as will do.
// Takes a problem with groups and a tolerance, gives a plan; what strays is reported by twPlan. Choices are made in
// whole numbers with fixed ties, so that ranks which plan for themselves get the same plan.
#include <algorithm>
#include <utility>

#include "balance/place.h"

namespace tw::balance {
namespace {

// How many replicas each expert has on each node, and what each node then carries.
class Nodes {
 public:
  Nodes(const Problem& problem, std::vector<int32_t> homes)
      : problem_(problem),
        shape_(problem.shape),
        homes_(std::move(homes)),
        counts_(static_cast<size_t>(shape_.nodes) * shape_.experts, 0),
        totals_(shape_.experts, 0),
        loads_(shape_.nodes, 0) {
    for (int32_t node = 0; node < shape_.nodes; ++node) replicate_at_home(node);
    for (int32_t node = 0; node < shape_.nodes; ++node) fill_vacancies(node);
    for (int32_t node = 0; node < shape_.nodes; ++node) {
      for (int32_t e = 0; e < shape_.experts; ++e) loads_[node] += count(node, e) * size(e);
    }
  }

  // Exchanges a slot of the hottest node with one of the coolest until no node carries more than `most`.
  void even_out(Load most) {
    for (int32_t left = shape_.places(); left > 0; --left) {
      const auto hot = static_cast<int32_t>(std::max_element(loads_.begin(), loads_.end()) - loads_.begin());
      const auto cool = static_cast<int32_t>(std::min_element(loads_.begin(), loads_.end()) - loads_.begin());
      if (loads_[hot] <= most || !exchange_one(hot, cool, most)) return;
    }
  }

  std::vector<Item> items(int32_t node) const {
    std::vector<Item> items;
    for (int32_t e = 0; e < shape_.experts; ++e) {
      if (count(node, e) > 0) items.push_back({size(e), e, count(node, e)});
    }
    return items;
  }

 private:
  int32_t slots() const { return shape_.slots * shape_.ranks_per_node(); }
  int32_t home(int32_t e) const { return homes_[e / (shape_.experts / shape_.groups)]; }
  int32_t& count(int32_t node, int32_t e) { return counts_[static_cast<size_t>(node) * shape_.experts + e]; }
  int32_t count(int32_t node, int32_t e) const { return counts_[static_cast<size_t>(node) * shape_.experts + e]; }
  Load size(int32_t e) const { return share(problem_.loads[e], totals_[e]); }

  void replicate_at_home(int32_t node) {
    std::vector<int32_t> experts;
    std::vector<Load> loads;
    for (int32_t e = 0; e < shape_.experts; ++e) {
      if (home(e) != node) continue;
      experts.push_back(e);
      loads.push_back(problem_.loads[e]);
    }
    const auto n = static_cast<int32_t>(experts.size());
    const auto counts = apportion(loads.data(), std::vector<int32_t>(n, shape_.ranks_per_node()), slots());
    for (int32_t i = 0; i < n; ++i) totals_[experts[i]] = count(node, experts[i]) = counts[i];
  }

  // Fills slots beyond what the replicas of the node's own experts can fill: the hottest other experts come too.
  void fill_vacancies(int32_t node) {
    int32_t filled = 0;
    for (int32_t e = 0; e < shape_.experts; ++e) filled += count(node, e);
    for (; filled < slots(); ++filled) {
      int32_t best = -1;
      for (int32_t e = 0; e < shape_.experts; ++e) {
        if (count(node, e) < shape_.ranks_per_node() && (best < 0 || size(e) > size(best))) best = e;
      }
      ++count(node, best);
      ++totals_[best];
    }
  }

  // The load that leaves its home when a slot of e moves so; negative if it comes home.
  Load strays(int32_t e, int32_t from, int32_t to) const {
    return home(e) == from ? size(e) : home(e) == to ? -size(e) : 0;
  }

  // Makes one exchange. Among those that take no more from the hot node than it has too much, it is the one with least
  // load gone astray for what it takes; if there is none, the one that takes least.
  bool exchange_one(int32_t hot, int32_t cool, Load most) {
    const Load over = loads_[hot] - most, difference = loads_[hot] - loads_[cool];
    int32_t from = -1, to = -1;
    Load taken = 0, gone = 0;
    for (int32_t e = 0; e < shape_.experts; ++e) {
      if (count(hot, e) == 0 || count(cool, e) >= shape_.ranks_per_node()) continue;
      for (int32_t f = 0; f < shape_.experts; ++f) {
        if (f == e || count(cool, f) == 0 || count(hot, f) >= shape_.ranks_per_node()) continue;
        const Load d = size(e) - size(f);
        if (d <= 0 || d >= difference) continue;
        const Load astray = strays(e, hot, cool) + strays(f, cool, hot);
        if (from < 0 || better(d, astray, taken, gone, over)) {
          from = e;
          to = f;
          taken = d;
          gone = astray;
        }
      }
    }
    if (from < 0) return false;
    --count(hot, from);
    ++count(cool, from);
    --count(cool, to);
    ++count(hot, to);
    loads_[hot] -= taken;
    loads_[cool] += taken;
    return true;
  }

  static bool better(Load d, Load astray, Load taken, Load gone, Load over) {
    // What is taken beyond the excess does not help.
    const Load helps = std::min(d, over), helped = std::min(taken, over);
    // astray / helps < gone / helped; 26 bits each are enough for a choice, and their products fit.
    const Load a = (astray >> 26) * (helped >> 26), b = (gone >> 26) * (helps >> 26);
    return a != b ? a < b : helps > helped;
  }

  const Problem& problem_;
  const Shape& shape_;
  std::vector<int32_t> homes_;   // [groups]
  std::vector<int32_t> counts_;  // [nodes, E]
  std::vector<int32_t> totals_;  // [E]
  std::vector<Load> loads_;      // [nodes]
};

// Gives every node the same number of groups, as evenly as can be: a problem like that of experts and ranks (kEven); or
// gives the largest group to the coolest node, as DeepSeek's algorithm does (kGreedy).
enum class Homes { kEven, kGreedy };
std::vector<int32_t> find_homes(const Problem& problem, Homes how) {
  const Shape& shape = problem.shape;
  Problem groups{{shape.groups, shape.nodes, shape.groups / shape.nodes, 1, 0}, {}, problem.total};
  groups.loads.assign(shape.groups, 0);
  for (int32_t e = 0; e < shape.experts; ++e) groups.loads[e / (shape.experts / shape.groups)] += problem.loads[e];
  const auto one_each = items_of(groups, std::vector<int32_t>(shape.groups, 1));
  const auto placed = how == Homes::kEven ? place_anywhere(groups).experts
                                          : pack(one_each, shape.nodes, groups.shape.slots, Start::kPlain, 0);
  std::vector<int32_t> homes(shape.groups);
  for (int32_t i = 0; i < shape.groups; ++i) homes[placed[i]] = i / groups.shape.slots;
  return homes;
}

// Packs what each node has over its ranks.
Packing pack_nodes(const Problem& problem, const Nodes& nodes) {
  const Shape& shape = problem.shape;
  const int32_t ranks = shape.ranks_per_node();
  std::vector<int32_t> experts;
  const Load goal = goal_of(problem.mean());
  for (int32_t node = 0; node < shape.nodes; ++node) {
    const auto here = pack(nodes.items(node), ranks, shape.slots, Start::kPlain, goal);
    experts.insert(experts.end(), here.begin(), here.end());
  }
  Packing packing(problem, std::move(experts));
  for (int32_t node = 0; node < shape.nodes; ++node) {
    Load node_load = 0;
    for (int32_t r = node * ranks; r < (node + 1) * ranks; ++r) node_load += packing.load(r);
    exchange(&packing, node * ranks, (node + 1) * ranks, goal_of(std::max(node_load / ranks, problem.mean())));
  }
  return packing;
}

}  // namespace

std::vector<int32_t> place_on_nodes(const Problem& problem, int64_t tolerance) {
  const Shape& shape = problem.shape;
  Nodes nodes(problem, find_homes(problem, Homes::kEven));
  Packing best = pack_nodes(problem, nodes);
  const Packing greedy = pack_nodes(problem, Nodes(problem, find_homes(problem, Homes::kGreedy)));
  if (greedy.peak() < best.peak()) best = greedy;
  const Load mean = problem.total / shape.nodes;
  nodes.even_out(mean + static_cast<Load>(static_cast<double>(mean) * (static_cast<double>(tolerance) / 1e6)));
  const Packing even = pack_nodes(problem, nodes);
  // Nodes that carry the same load can have ranks that do not, above all where there is a slot for each expert and no
  // more.
  return even.peak() < best.peak() ? even.experts() : best.experts();
}

std::vector<int32_t> homes_of(const Problem& problem, const std::vector<int32_t>& experts) {
  const Shape& shape = problem.shape;
  const int32_t per_group = shape.experts / shape.groups;
  std::vector<int32_t> slots(static_cast<size_t>(shape.groups) * shape.nodes, 0), homes;
  for (int32_t place = 0; place < shape.places(); ++place) {
    ++slots[static_cast<size_t>(experts[place] / per_group) * shape.nodes + shape.node_of(place / shape.slots)];
  }
  for (int32_t g = 0; g < shape.groups; ++g) {
    const auto first = slots.begin() + static_cast<int64_t>(g) * shape.nodes;
    homes.push_back(static_cast<int32_t>(std::max_element(first, first + shape.nodes) - first));
  }
  return homes;
}

double stray_share(const Problem& problem, const std::vector<int32_t>& experts) {
  const Shape& shape = problem.shape;
  if (shape.groups == 0 || problem.total == 0) return 0;
  const Packing packing(problem, experts);
  const auto homes = homes_of(problem, experts);
  Load astray = 0;
  for (int32_t place = 0; place < shape.places(); ++place) {
    const int32_t home = homes[experts[place] / (shape.experts / shape.groups)];
    if (home != shape.node_of(place / shape.slots)) astray += packing.share_at(place);
  }
  return static_cast<double>(astray) / static_cast<double>(problem.total);
}

}  // namespace tw::balance
