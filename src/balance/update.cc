// Changes few slots of a plan that is in use. Takes the old plan and a number of writes, gives a plan that differs in
// at most so many slots. A write costs a copy of an expert's weights, so changes are chosen by how much cooler the hot
// ranks become for each write.
//
// For a limit T, the excess is the sum over ranks of what they carry above T. Step by step the hottest rank gets the
// change that lowers the excess most per write: an exchange of two slots (two writes), or one slot given to another
// expert, whose replicas then all carry less (one write). T itself is narrowed down by halving: a T that is too low
// spends writes on ranks that need none, one that is too high leaves some unused. writes_ must count exactly, or an
// update copies more weights than the caller allowed.
#include "balance/update.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "balance/bound.h"
#include "balance/place.h"

namespace tw::balance {
namespace {

constexpr int32_t kHalvings = 6;
constexpr int32_t kPolishPatience = 4;

struct Change {
  Load gain = 0;       // excess that goes
  int32_t writes = 0;  // writes that it adds: less than one if slots get back what they had
  int32_t place = -1, expert = -1;
  int32_t other = -1, other_expert = -1;  // for an exchange

  // A change without writes counts as half a write.
  int64_t cost() const { return writes > 0 ? 2 * writes : 1; }
  bool better_than(const Change& than) const { return gain * than.cost() > than.gain * cost(); }
};

class Updater {
 public:
  // Begins with `start`, whose writes count.
  Updater(const Problem& problem, const std::vector<int32_t>& old, const std::vector<int32_t>& start, int32_t budget,
          int64_t tolerance)
      : shape_(problem.shape),
        problem_(problem),
        old_(old),
        budget_(budget),
        packing_(problem, start),
        ranks_of_(shape_.experts),
        with_one_more_(shape_.experts),
        with_one_less_(shape_.experts),
        sizes_(shape_.places()),
        changed_(shape_.places()),
        deltas_(shape_.ranks, 0) {
    if (shape_.groups > 0) {
      homes_ = homes_of(problem, old);
      const Load mean = problem.total / shape_.nodes;
      most_of_node_ = mean + static_cast<Load>(static_cast<double>(mean) * (static_cast<double>(tolerance) / 1e6));
    }
    for (int32_t e = 0; e < shape_.experts; ++e) divide(e);
    for (int32_t place = 0; place < shape_.places(); ++place) {
      ranks_of_[start[place]].push_back(place / shape_.slots);
      writes_ += start[place] != old[place] ? 1 : 0;
    }
  }

  // Lowers the excess over `limit` as far as the budget goes, or until `patience` ranks could not be helped.
  void run(Load limit, int32_t patience) {
    limit_ = limit;
    std::vector<char> stuck(shape_.ranks, 0);
    for (;;) {
      int32_t r = -1;
      for (int32_t q = 0; q < shape_.ranks; ++q) {
        if (!stuck[q] && packing_.load(q) > limit && (r < 0 || packing_.load(q) > packing_.load(r))) r = q;
      }
      if (r < 0 || writes_ >= budget_) return;
      const Change change = find(r);
      if (change.place < 0) {
        if (--patience < 0) return;
        stuck[r] = 1;
        continue;
      }
      apply(change);
      stuck.assign(shape_.ranks, 0);
    }
  }

  const Packing& packing() const { return packing_; }
  int32_t writes() const { return writes_; }

 private:
  Load excess(Load load) const { return std::max<Load>(load - limit_, 0); }

  int32_t cost_of(int32_t place, int32_t expert) const {
    return (expert != old_[place] ? 1 : 0) - (packing_.at(place) != old_[place] ? 1 : 0);
  }

  // Whether an expert may come to rank q so that rank r gets cooler.
  bool may_come(int32_t expert, int32_t q, int32_t r) const {
    if (shape_.groups == 0 || homes_[expert / (shape_.experts / shape_.groups)] == shape_.node_of(q)) return true;
    const int32_t node = shape_.node_of(r), ranks = shape_.ranks_per_node();
    if (node == shape_.node_of(q)) return false;
    Load node_load = 0;
    for (int32_t i = node * ranks; i < (node + 1) * ranks; ++i) node_load += packing_.load(i);
    return node_load > most_of_node_;
  }

  Change find(int32_t r) {
    Change best;
    spare_.clear();
    for (int32_t place = 0; place < shape_.places(); ++place) {
      sizes_[place] = packing_.share_at(place);
      changed_[place] = packing_.at(place) != old_[place];
      if (packing_.count(packing_.at(place)) > 1) spare_.push_back({place, harm_of(place)});
    }
    for (int32_t i = r * shape_.slots; i < (r + 1) * shape_.slots; ++i) {
      find_exchange(r, i, &best);
      find_replica(r, packing_.at(i), &best);
      if (packing_.count(packing_.at(i)) > 1) find_replacement(r, i, &best);
    }
    return best;
  }

  void consider(const Change& change, Change* best) const {
    if (change.gain <= 0 || writes_ + change.writes > budget_) return;
    if (best->place < 0 || change.better_than(*best)) *best = change;
  }

  void find_exchange(int32_t r, int32_t i, Change* best) const {
    const int32_t e = packing_.at(i);
    const Load size = sizes_[i], over = packing_.load(r) - limit_;
    for (int32_t q = 0; q < shape_.ranks; ++q) {
      const Load room = limit_ - packing_.load(q);
      if (q == r || room <= 0) continue;
      for (int32_t j = q * shape_.slots; j < (q + 1) * shape_.slots; ++j) {
        const Load d = size - sizes_[j];
        Change change{std::min(d, over) - std::max<Load>(d - room, 0), 2, i, -1, j, e};
        if (d <= 0 || change.gain <= 0) continue;
        change.expert = packing_.at(j);
        // Two slots that are as in the old plan get experts that they did not hold, so this is two writes.
        if (changed_[i] || changed_[j]) change.writes = cost_of(i, change.expert) + cost_of(j, e);
        if (best->place >= 0 && !change.better_than(*best)) continue;
        if (!packing_.can_swap(i, j) || !may_come(e, q, r) || !may_come(change.expert, r, r)) continue;
        consider(change, best);
      }
    }
  }

  // The excess that goes if `place` gets `expert` instead of another that has more replicas.
  Load gain_of(int32_t place, int32_t expert) {
    const int32_t before = packing_.at(place), q = place / shape_.slots;
    const Load less = packing_.share_of(expert) - with_one_more_[expert];
    const Load more = with_one_less_[before] - packing_.share_of(before);
    touched_.clear();
    const auto add = [&](int32_t rank, Load delta) {
      if (deltas_[rank] == 0) touched_.push_back(rank);
      deltas_[rank] += delta;
    };
    add(q, packing_.share_of(expert) - less - packing_.share_of(before) - more);
    for (const int32_t rank : ranks_of_[expert]) add(rank, -less);
    for (const int32_t rank : ranks_of_[before]) add(rank, more);
    Load gain = 0;
    for (const int32_t rank : touched_) {
      gain += excess(packing_.load(rank)) - excess(packing_.load(rank) + deltas_[rank]);
      deltas_[rank] = 0;  // so that a rank listed twice counts once
    }
    return gain;
  }

  // The excess that goes if a rank carries so much more (negative: that comes).
  Load gain_at(int32_t rank, Load more) const {
    return excess(packing_.load(rank)) - excess(packing_.load(rank) + more);
  }

  // The most by which a further replica of an expert can lower the excess.
  Load promise(int32_t expert) const {
    const Load less = packing_.share_of(expert) - with_one_more_[expert];
    Load gain = 0;
    for (const int32_t rank : ranks_of_[expert]) gain += std::min(less, excess(packing_.load(rank)));
    return gain;
  }

  // The excess that comes on the ranks of its other replicas, if the expert at `place` loses that replica.
  Load harm_of(int32_t place) const {
    const int32_t e = packing_.at(place), q = place / shape_.slots;
    const Load more = with_one_less_[e] - sizes_[place];
    Load harm = 0;
    for (const int32_t rank : ranks_of_[e]) {
      if (rank != q) harm -= gain_at(rank, more);
    }
    return harm;
  }

  // Looks for a further replica of an expert of rank r, elsewhere.
  void find_replica(int32_t r, int32_t e, Change* best) {
    const Load most = promise(e);
    for (const auto& [place, harm] : spare_) {
      const int32_t q = place / shape_.slots;
      if (q != r && packing_.at(place) != e) try_replica(most - harm, place, e, r, best);
    }
  }

  // Looks for another expert instead of a replica that rank r holds.
  void find_replacement(int32_t r, int32_t place, Change* best) {
    const Load size = sizes_[place], harm = harm_of(place);
    for (int32_t e = 0; e < shape_.experts; ++e) {
      if (e != packing_.at(place) && with_one_more_[e] < size) try_replica(promise(e) - harm, place, e, r, best);
    }
  }

  // Considers a replica of e at `place`. `elsewhere`: what it gains on the other ranks, if none holds both e and the
  // expert that makes room; this is looked at before gain_of, which is dear.
  void try_replica(Load elsewhere, int32_t place, int32_t e, int32_t r, Change* best) {
    const int32_t q = place / shape_.slots;
    Change change{elsewhere + gain_at(q, with_one_more_[e] - sizes_[place]), cost_of(place, e), place, e};
    if (change.gain <= 0 || (best->place >= 0 && !change.better_than(*best))) return;
    if (packing_.holds(q, e) || !may_come(e, q, r)) return;
    change.gain = gain_of(place, e);
    consider(change, best);
  }

  void apply(const Change& change) {
    writes_ += change.writes;
    const int32_t rank = change.place / shape_.slots, before = packing_.at(change.place);
    move(before, rank, -1);
    move(change.expert, -1, rank);
    if (change.other < 0) {
      packing_.replace(change.place, change.expert);
      divide(before);
      divide(change.expert);
      return;
    }
    const int32_t other = change.other / shape_.slots;
    move(change.expert, other, -1);
    move(before, -1, other);
    packing_.swap(change.place, change.other);
  }

  // Keeps shares at other counts: divisions are dear, and these are needed again and again.
  void divide(int32_t e) {
    const int32_t count = packing_.count(e);
    with_one_more_[e] = share(problem_.loads[e], count + 1);
    with_one_less_[e] = count > 1 ? share(problem_.loads[e], count - 1) : 0;
  }

  void move(int32_t expert, int32_t from, int32_t to) {
    auto& ranks = ranks_of_[expert];
    if (from >= 0) ranks.erase(std::find(ranks.begin(), ranks.end(), from));
    if (to >= 0) ranks.push_back(to);
  }

  const Shape& shape_;
  const Problem& problem_;
  const std::vector<int32_t>& old_;
  int32_t budget_, writes_ = 0;
  Packing packing_;
  std::vector<std::vector<int32_t>> ranks_of_;       // [E] the ranks of each expert, one entry a replica
  std::vector<Load> with_one_more_, with_one_less_;  // share of each expert at another count; 0 without a replica
  std::vector<int32_t> homes_;
  Load most_of_node_ = 0, limit_ = 0;
  std::vector<Load> sizes_;                      // share in each slot, for one search
  std::vector<std::pair<int32_t, Load>> spare_;  // places whose expert has another, and the harm of giving them up
  std::vector<char> changed_;                    // whether a slot holds another expert than in the old plan
  std::vector<Load> deltas_;                     // [N], all zero between uses
  std::vector<int32_t> touched_;
};

// A plan in which ranks hold no expert twice, as far as the budget goes. Each second replica makes room for an expert
// that the rank lacks: the one with which the hottest rank carries least; if some of these experts are at home there,
// one of them.
std::vector<int32_t> without_doubles(const Problem& problem, const std::vector<int32_t>& old, int32_t budget) {
  const Shape& shape = problem.shape;
  if (!has_doubles(shape, old)) return old;
  Packing packing(problem, old);
  const std::vector<int32_t> homes = shape.groups > 0 ? homes_of(problem, old) : std::vector<int32_t>{};
  for (int32_t place = 0; place < shape.places() && budget > 0; ++place) {
    if (!is_double(packing.experts(), shape.slots, place)) continue;
    const int32_t rank = place / shape.slots;
    std::optional<Packing> best;
    bool best_at_home = false;
    for (int32_t e = 0; e < shape.experts; ++e) {
      const bool at_home = homes.empty() || homes[e / (shape.experts / shape.groups)] == shape.node_of(rank);
      if (packing.holds(rank, e) || (best_at_home && !at_home)) continue;
      Packing trial = packing;
      trial.replace(place, e);
      const auto heat = [&](const Packing& made) { return std::pair(made.peak(), made.load(rank)); };
      if (best && at_home == best_at_home && heat(trial) >= heat(*best)) continue;
      best = std::move(trial);
      best_at_home = at_home;
    }
    packing = std::move(*best);
    --budget;
  }
  return packing.experts();
}

}  // namespace

bool has_doubles(const Shape& shape, const std::vector<int32_t>& experts) {
  if (shape.slots > shape.experts) return false;
  for (int32_t place = 0; place < shape.places(); ++place) {
    if (is_double(experts, shape.slots, place)) return true;
  }
  return false;
}

std::vector<int32_t> update(const Problem& problem, const std::vector<int32_t>& old, int32_t budget,
                            int64_t tolerance) {
  const std::vector<int32_t> start = without_doubles(problem, old, budget);
  Packing best(problem, start);
  Load low = lower_bound(problem, 0), high = best.peak();
  if (budget == 0 || high <= goal_of(low)) return start;
  for (int32_t i = 0; i < kHalvings; ++i) {
    // The first tries are nearer to the bound, as that is where a large budget gets to.
    const Load limit = low + (high - low) / (i == 0 ? 64 : i == 1 ? 8 : 2);
    Updater updater(problem, old, start, budget, tolerance);
    updater.run(limit, 6);
    const Load peak = updater.packing().peak();
    if (peak < best.peak()) best = updater.packing();
    if (peak <= limit) {
      high = limit;
    } else {
      low = limit;
      high = std::min(high, peak);
    }
    if (high - low <= problem.mean() / 2000) break;
  }
  return best.experts();
}

std::vector<int32_t> polish(const Problem& problem, const std::vector<int32_t>& plan, Load goal) {
  Updater updater(problem, plan, plan, problem.shape.places(), 0);
  updater.run(goal, kPolishPatience);
  return updater.packing().peak() < Packing(problem, plan).peak() ? updater.packing().experts() : plan;
}

}  // namespace tw::balance
