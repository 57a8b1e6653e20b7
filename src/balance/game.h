// Two-player games given by their payoffs, row by row: Game takes rows and gives the best mixture of columns.
// company.cc looks for weights with it. A worse mixture gives a weaker bound, never a wrong one; but the weights must
// be the same on all machines.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace tw::balance {

// A game of two players. One mixes columns and wants to pay little; the other picks the row that is paid most for the
// mixture. Rows come one by one, and the best mixture follows by a few pivots of the dual simplex method. It computes
// in doubles: what is proven with a mixture must be proven by other means (no contraction or reordering is compiled, so
// that all machines get the same).
class Game {
 public:
  // Payoffs lie strictly between -bound and bound.
  Game(int32_t columns, double bound) : columns_(columns), bound_(bound) {}

  // Adds a row; payoffs: [columns]. False if rounding left no way on.
  bool add(const std::vector<double>& payoffs);

  // The best mixture, after the first row: its weights [columns], which add up to 1, and what the best row is paid.
  std::vector<double> weights() const;
  double value() const;

 private:
  // With b = 1 + payoff / bound > 0, the best weights are the x >= 0 of the largest sum for which b x <= 1 in all rows,
  // divided by that sum. The simplex tableau has a row for each row of payoffs, and one of costs; its last column is
  // the right-hand side. Variables are x (0..columns-1) and the slack of each row (from columns on); the variables of
  // the tableau's rows are the basis.
  struct TableauRow {
    std::vector<double> cells;
    int32_t basic;
  };

  void pivot(size_t row, int32_t column);

  int32_t columns_;
  double bound_;
  std::vector<TableauRow> tableau_;
  std::vector<double> costs_;
  std::vector<int32_t> outside_;  // the variable of each column
};

}  // namespace tw::balance
