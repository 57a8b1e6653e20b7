// The planner: against brute force where that is possible, and what holds of every plan.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "balance/bound.h"
#include "balance/game.h"
#include "balance/packing.h"
#include "balance/place.h"
#include "balance/plan.h"
#include "balance/update.h"
#include "tokenway/tokenway.h"

namespace {

using tw::balance::Load;
using tw::balance::Packing;
using tw::balance::Problem;
using tw::balance::Shape;

Problem problem_of(const Shape& shape, std::vector<Load> loads) {
  Problem problem{shape, std::move(loads), 0};
  for (const Load load : problem.loads) problem.total += load;
  return problem;
}

// Heavy-tailed, without the library's exp(): the same numbers everywhere.
std::vector<Load> random_loads(int32_t experts, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<Load> loads;
  for (int32_t e = 0; e < experts; ++e) {
    const Load u = 1 + random() % 1000;
    loads.push_back(u * u * u);
  }
  return loads;
}

void expect_valid(const Shape& shape, const std::vector<int32_t>& experts) {
  ASSERT_EQ(experts.size(), static_cast<size_t>(shape.places()));
  std::vector<int32_t> counts(shape.experts, 0);
  for (int32_t r = 0; r < shape.ranks; ++r) {
    std::set<int32_t> on_rank;
    for (int32_t i = r * shape.slots; i < (r + 1) * shape.slots; ++i) {
      ASSERT_GE(experts[i], 0);
      ASSERT_LT(experts[i], shape.experts);
      ++counts[experts[i]];
      on_rank.insert(experts[i]);
    }
    ASSERT_EQ(on_rank.size(), static_cast<size_t>(std::min(shape.slots, shape.experts))) << "rank " << r;
  }
  for (int32_t e = 0; e < shape.experts; ++e) EXPECT_GE(counts[e], 1) << "expert " << e;
}

// The least that the hottest rank can carry, by trying everything: every filling of the slots, rank by rank, in
// ascending order of what the ranks hold (ranks are interchangeable). Exact in doubles to 1e-12.
class BruteForce {
 public:
  BruteForce(const Shape& shape, const std::vector<Load>& loads) : shape_(shape), loads_(loads) {
    list_sets(0, {});
    fill(0, 0);
  }
  double best() const { return best_; }

 private:
  void list_sets(int32_t from, std::vector<int32_t> set) {
    if (static_cast<int32_t>(set.size()) == shape_.slots) {
      sets_.push_back(set);
      return;
    }
    for (int32_t e = from; e < shape_.experts; ++e) {
      set.push_back(e);
      list_sets(e + 1, set);
      set.pop_back();
    }
  }

  void fill(int32_t rank, size_t from) {
    if (rank == shape_.ranks) {
      score();
      return;
    }
    for (size_t s = from; s < sets_.size(); ++s) {
      chosen_.push_back(s);
      fill(rank + 1, s);
      chosen_.pop_back();
    }
  }

  void score() {
    std::vector<int32_t> counts(shape_.experts, 0);
    for (const size_t s : chosen_) {
      for (const int32_t e : sets_[s]) ++counts[e];
    }
    if (std::find(counts.begin(), counts.end(), 0) != counts.end()) return;
    double peak = 0;
    for (const size_t s : chosen_) {
      double load = 0;
      for (const int32_t e : sets_[s]) load += static_cast<double>(loads_[e]) / counts[e];
      peak = std::max(peak, load);
    }
    best_ = std::min(best_, peak);
  }

  const Shape shape_;
  const std::vector<Load>& loads_;
  std::vector<std::vector<int32_t>> sets_;
  std::vector<size_t> chosen_;
  double best_ = std::numeric_limits<double>::infinity();
};

struct Planned {
  std::vector<int32_t> experts;
  std::vector<double> loads;
  double bound, stray, peak;
};

Planned plan(const Shape& shape, const std::vector<double>& loads, const std::vector<int32_t>* old = nullptr,
             int32_t budget = 0, int64_t tolerance = 10000) {
  Planned planned{std::vector<int32_t>(shape.places()), std::vector<double>(shape.ranks), 0, 0, 0};
  const tw::balance::Request request{shape, 1, tolerance, budget, old == nullptr ? nullptr : old->data()};
  tw::balance::Result result{planned.experts.data(), planned.loads.data(), 0, 0};
  tw::balance::plan_layer(request, 0, loads.data(), &result);
  planned.bound = result.bound;
  planned.stray = result.stray;
  planned.peak = *std::max_element(planned.loads.begin(), planned.loads.end());
  return planned;
}

std::vector<double> as_doubles(const std::vector<Load>& loads) { return {loads.begin(), loads.end()}; }

int32_t writes(const std::vector<int32_t>& a, const std::vector<int32_t>& b) {
  int32_t count = 0;
  for (size_t i = 0; i < a.size(); ++i) count += a[i] != b[i] ? 1 : 0;
  return count;
}

TEST(Balance, EightExpertsAreOptimal) {
  const Shape shapes[] = {{8, 2, 4, 1, 0}, {8, 2, 5, 1, 0}, {8, 2, 6, 1, 0}, {8, 3, 3, 1, 0},
                          {8, 4, 2, 1, 0}, {8, 4, 3, 1, 0}, {8, 5, 2, 1, 0}, {8, 3, 4, 1, 0}};
  for (const Shape& shape : shapes) {
    for (uint32_t seed = 0; seed < 8; ++seed) {
      const auto loads = random_loads(8, 100 + seed);
      const Planned planned = plan(shape, as_doubles(loads));
      expect_valid(shape, planned.experts);
      const double best = BruteForce(shape, loads).best();
      EXPECT_NEAR(planned.peak / best, 1, 2e-5) << shape.ranks << " ranks of " << shape.slots << ", seed " << seed;
      EXPECT_LE(planned.bound, best * (1 + 1e-12)) << shape.ranks << " ranks of " << shape.slots << ", seed " << seed;
    }
  }
}

TEST(Balance, BoundsHoldForAllPlans) {
  // Few slots a rank, where the third bound counts: against every plan.
  int tight = 0, trials = 0;
  const auto expect_below = [&](const Shape& shape, uint32_t seed) {
    const auto loads = random_loads(shape.experts, seed);
    const Problem problem = problem_of(shape, loads);
    const double best = BruteForce(shape, loads).best();
    for (const double reached : {best, 1.02 * best, 3 * best}) {
      const auto bound = static_cast<double>(tw::balance::lower_bound(problem, static_cast<Load>(reached) + 1));
      EXPECT_LE(bound, best * (1 + 1e-12) + 1) << shape.ranks << " ranks of " << shape.slots << ", seed " << seed;
      ++trials;
      tight += bound > 0.99 * best ? 1 : 0;
    }
  };
  for (uint32_t seed = 0; seed < 60; ++seed) {
    expect_below({5 + static_cast<int32_t>(seed % 3), 4, 2, 1, 0}, seed);
    expect_below({6, 5, 2, 1, 0}, seed);
    expect_below({6, 3, 3, 1, 0}, seed);
  }
  EXPECT_GT(tight, trials / 2);  // and it says something
  // Small loads, where a step towards a bound rounds to nothing.
  for (uint32_t seed = 0; seed < 40; ++seed) {
    std::vector<Load> loads = random_loads(6, seed);
    for (Load& load : loads) load %= 7;
    const Shape shape{6, 4, 2, 1, 0};
    const Load bound = tw::balance::lower_bound(problem_of(shape, loads), 50);
    EXPECT_LE(static_cast<double>(bound), BruteForce(shape, loads).best() + 1) << "seed " << seed;
  }
}

// The least that the hottest pair can carry, by trying all counts, the largest paired with the smallest: optimal but
// for pairs of one expert, which no plan has.
double best_of_pairs(const Shape& shape, const std::vector<Load>& loads) {
  double best = std::numeric_limits<double>::infinity();
  std::vector<int32_t> counts(shape.experts, 1);
  const std::function<void(int32_t, int32_t)> choose = [&](int32_t e, int32_t spare) {
    if (e + 1 < shape.experts) {
      for (int32_t more = 0; more <= spare; ++more) {
        counts[e] = 1 + more;
        choose(e + 1, spare - more);
      }
      return;
    }
    counts[e] = 1 + spare;
    std::vector<double> sizes;
    for (int32_t i = 0; i < shape.experts; ++i) {
      sizes.insert(sizes.end(), counts[i], static_cast<double>(loads[i]) / counts[i]);
    }
    std::sort(sizes.begin(), sizes.end());
    double peak = 0;
    for (size_t i = 0; i < sizes.size() / 2; ++i) peak = std::max(peak, sizes[i] + sizes[sizes.size() - 1 - i]);
    best = std::min(best, peak);
  };
  choose(0, shape.places() - shape.experts);
  return best;
}

TEST(Balance, PairsAreNearlyOptimal) {
  // Too many slots for place_exactly().
  double sum = 0;
  int32_t trials = 0;
  for (const Shape& shape : {Shape{20, 12, 2, 1, 0}, Shape{30, 17, 2, 1, 0}, Shape{40, 21, 2, 1, 0}}) {
    for (uint32_t seed = 0; seed < 20; ++seed) {
      auto loads = random_loads(shape.experts, 500 + seed);
      // Less heavy-tailed: else one expert alone decides.
      for (Load& load : loads) load = static_cast<Load>(std::sqrt(static_cast<double>(load)));
      const Planned planned = plan(shape, as_doubles(loads));
      expect_valid(shape, planned.experts);
      const double best = best_of_pairs(shape, loads);
      EXPECT_LE(planned.bound, best * (1 + 1e-12)) << shape.ranks << " ranks, seed " << seed;
      EXPECT_LE(planned.peak, 1.05 * best) << shape.ranks << " ranks, seed " << seed;
      sum += planned.peak / best;
      ++trials;
    }
  }
  EXPECT_LE(sum / trials, 1.003);
}

TEST(Balance, GamesAreSolved) {
  std::mt19937 random(5);
  for (int trial = 0; trial < 200; ++trial) {
    const int32_t columns = 1 + random() % 4, rows = 1 + random() % 8;
    tw::balance::Game game(columns, 100);
    std::vector<std::vector<double>> payoffs;
    const auto most = [&](const std::vector<double>& weights) {
      double found = -100;
      for (const auto& row : payoffs) {
        found = std::max(found, std::inner_product(row.begin(), row.end(), weights.begin(), 0.0));
      }
      return found;
    };
    for (int32_t i = 0; i < rows; ++i) {
      payoffs.emplace_back();
      for (int32_t k = 0; k < columns; ++k) payoffs.back().push_back(static_cast<double>(random() % 40) - 20);
      ASSERT_TRUE(game.add(payoffs.back()));
      const auto weights = game.weights();
      EXPECT_NEAR(std::accumulate(weights.begin(), weights.end(), 0.0), 1, 1e-9);
      EXPECT_NEAR(most(weights), game.value(), 1e-7);
      // No random mixture, and no column alone, pays less.
      for (int other = 0; other < 300; ++other) {
        std::vector<double> tried(columns, 0);
        double sum = 0;
        for (double& weight : tried) sum += weight = static_cast<double>(random() % 5);
        if (sum == 0) sum = tried[random() % columns] = 1;
        for (double& weight : tried) weight /= sum;
        EXPECT_GE(most(tried), game.value() - 1e-7);
      }
    }
  }
}

TEST(Balance, PropertiesOfRandomShapes) {
  std::mt19937 random(7);
  for (int trial = 0; trial < 400; ++trial) {
    const int32_t experts = 1 + random() % 40, ranks = 1 + random() % 12;
    const int32_t slots = (experts + ranks - 1) / ranks + random() % 4;
    const Shape shape{experts, ranks, slots, 1, 0};
    auto loads = as_doubles(random_loads(experts, trial));
    for (double& load : loads) load = random() % 5 == 0 ? 0 : load;  // some have none
    const Planned planned = plan(shape, loads);
    expect_valid(shape, planned.experts);
    EXPECT_LE(planned.bound, planned.peak);
    double total = 0, carried = 0;
    for (const double load : loads) total += load;
    for (const double load : planned.loads) carried += load;
    EXPECT_NEAR(carried, total, 1e-9 * total);
    EXPECT_EQ(plan(shape, loads).experts, planned.experts);
  }
}

TEST(Balance, UpdatesKeepTheirBudget) {
  std::mt19937 random(11);
  for (int trial = 0; trial < 150; ++trial) {
    const int32_t ranks = 2 + random() % 10, experts = ranks * (1 + random() % 4);
    const Shape shape{experts, ranks, experts / ranks + 1, 1, 0};
    const auto before = as_doubles(random_loads(experts, trial)),
               after = as_doubles(random_loads(experts, trial + 999));
    const Planned old = plan(shape, before);
    for (const int32_t budget : {0, 1, 2, 5, 1000000}) {
      const Planned updated = plan(shape, after, &old.experts, budget);
      expect_valid(shape, updated.experts);
      EXPECT_LE(writes(old.experts, updated.experts), budget);
      const Planned kept = plan(shape, after, &old.experts, 0);
      EXPECT_LE(updated.peak, kept.peak * (1 + 1e-12));
    }
    // Loads that the plan was made for leave nothing to do.
    EXPECT_EQ(writes(old.experts, plan(shape, before, &old.experts, 1000000).experts), 0);
  }
}

TEST(Balance, RelabelKeepsWhatIsThere) {
  const Shape shape{64, 8, 9, 2, 8};
  const Planned planned = plan(shape, as_doubles(random_loads(64, 3)));
  // The same plan with nodes, ranks of a node and slots in another order.
  std::vector<int32_t> shuffled;
  for (const int32_t rank : {6, 5, 7, 4, 1, 0, 3, 2}) {
    std::vector<int32_t> here(planned.experts.begin() + rank * 9, planned.experts.begin() + rank * 9 + 9);
    std::rotate(here.begin(), here.begin() + rank, here.end());
    shuffled.insert(shuffled.end(), here.begin(), here.end());
  }
  EXPECT_EQ(tw::balance::relabel(shape, shuffled, planned.experts), planned.experts);
}

TEST(Balance, GroupsStayAtHome) {
  const Shape shape{64, 16, 6, 4, 8};
  for (uint32_t seed = 0; seed < 20; ++seed) {
    const auto loads = as_doubles(random_loads(64, seed));
    const Planned strict = plan(shape, loads, nullptr, 0, 4000000);
    expect_valid(shape, strict.experts);
    EXPECT_EQ(strict.stray, 0);
    for (int32_t group = 0; group < 8; ++group) {
      std::set<int32_t> nodes;
      for (int32_t slot = 0; slot < shape.places(); ++slot) {
        if (strict.experts[slot] / 8 == group) nodes.insert(shape.node_of(slot / shape.slots));
      }
      EXPECT_EQ(nodes.size(), 1u) << "group " << group;
    }
    const Planned free = plan(shape, loads);
    expect_valid(shape, free.experts);
    EXPECT_LE(free.peak, strict.peak * (1 + 1e-12));
    EXPECT_LE(free.stray, 0.25);
  }
}

TEST(Balance, ArgumentsAreNamed) {
  twPlanConfig_t config = TW_PLAN_CONFIG_INIT;
  config.num_layers = 1;
  config.num_experts = 4;
  config.num_ranks = 2;
  config.slots_per_rank = 2;
  double loads[] = {1, 2, 3, 4};
  int32_t map[4];
  twTensor_t tensor = TW_TENSOR_INIT;
  tensor.data = loads;
  tensor.dtype = twFloat64;
  tensor.ndim = 2;
  tensor.shape[0] = 1;
  tensor.shape[1] = tensor.stride[0] = 4;
  tensor.stride[1] = 1;
  twPlanOutput_t output = TW_PLAN_OUTPUT_INIT;
  output.physical_to_logical = map;
  const auto said = [&](const char* text) {
    EXPECT_EQ(twPlan(&config, &tensor, &output), twInvalidArgument) << text;
    EXPECT_NE(std::string(twLastError()).find(text), std::string::npos) << twLastError();
  };
  ASSERT_EQ(twPlan(&config, &tensor, &output), twSuccess);
  loads[2] = std::nan("");
  said("loads[0, 2] is nan");
  loads[2] = -1;
  said("loads[0, 2] is -1");
  loads[2] = std::numeric_limits<double>::infinity();
  said("loads[0, 2] is inf");
  loads[2] = loads[3] = 1e308;
  said("loads[0] add up");
  loads[3] = 4;
  ASSERT_EQ(twPlan(&config, &tensor, &output), twSuccess);
  config.slots_per_rank = 1;
  said("config.slots_per_rank is 1; it must be from 2");
  config.slots_per_rank = 2;
  config.num_nodes = 3;
  said("config.num_nodes is 3");
  config.num_nodes = 2;
  config.num_groups = 3;
  said("config.num_groups is 3");
  config.num_groups = 0;
  config.node_tolerance = std::nan("");
  said("config.node_tolerance is nan");
  config.node_tolerance = 0;
  const int32_t old[] = {0, 1, 2, 2};
  config.old_map = old;
  said("config.old_map[0] has no slot for expert 3");
  const int32_t beyond[] = {0, 1, 2, 4};
  config.old_map = beyond;
  said("config.old_map[0, 3] is 4; it must be from 0 to 3");
  config.old_map = nullptr;
  config.size = sizeof config - 8;  // an older caller, without max_writes
  EXPECT_EQ(twPlan(&config, &tensor, &output), twSuccess);
  output.physical_to_logical = nullptr;
  said("output.physical_to_logical is NULL");
}

}  // namespace
