// The dual simplex method of Game (balance/game.h): add() takes a row and pivots until the mixture is best again. It
// computes in doubles, in a fixed order, without contraction, so that all machines get the same weights; what is proven
// with them is proven elsewhere in whole numbers.
#include "balance/game.h"

#include <algorithm>
#include <utility>

namespace tw::balance {
namespace {

constexpr double kZero = 1e-11;
constexpr int32_t kPivots = 200;  // at most, for a row: it takes a handful

}  // namespace

bool Game::add(const std::vector<double>& payoffs) {
  const bool first = tableau_.empty();
  if (first) {
    costs_.assign(columns_ + 1, -1);
    costs_.back() = 0;
    for (int32_t i = 0; i < columns_; ++i) outside_.push_back(i);
  }
  const auto paid = [&](int32_t variable) { return variable < columns_ ? 1 + payoffs[variable] / bound_ : 0; };
  TableauRow made{{}, columns_ + static_cast<int32_t>(tableau_.size())};
  for (const int32_t variable : outside_) made.cells.push_back(paid(variable));
  made.cells.push_back(1);
  for (const TableauRow& row : tableau_) {
    const double factor = paid(row.basic);
    if (factor == 0) continue;
    for (int32_t i = 0; i <= columns_; ++i) made.cells[i] -= factor * row.cells[i];
  }
  tableau_.push_back(std::move(made));
  if (first) {
    const auto& cells = tableau_[0].cells;
    pivot(0, static_cast<int32_t>(std::min_element(cells.begin(), cells.end() - 1) - cells.begin()));
    return true;
  }
  // No cost is negative; rows whose right-hand side is negative leave.
  for (int32_t i = 0; i < kPivots; ++i) {
    size_t leaves = 0;
    for (size_t k = 1; k < tableau_.size(); ++k) {
      if (tableau_[k].cells.back() < tableau_[leaves].cells.back()) leaves = k;
    }
    const auto& cells = tableau_[leaves].cells;
    if (cells.back() >= -kZero) return true;
    int32_t enters = -1;
    for (int32_t k = 0; k < columns_; ++k) {
      if (cells[k] >= -kZero) continue;
      if (enters < 0 || costs_[k] * cells[enters] > costs_[enters] * cells[k]) enters = k;
    }
    if (enters < 0) return false;
    pivot(leaves, enters);
  }
  return false;
}

void Game::pivot(size_t row, int32_t column) {
  auto& chosen = tableau_[row].cells;
  const double by = 1 / chosen[column];
  for (double& cell : chosen) cell *= by;
  chosen[column] = by;
  const auto clear = [&](std::vector<double>* cells) {
    const double factor = (*cells)[column];
    if (factor == 0) return;
    (*cells)[column] = 0;
    for (int32_t i = 0; i <= columns_; ++i) (*cells)[i] -= factor * chosen[i];
  };
  for (size_t k = 0; k < tableau_.size(); ++k) {
    if (k != row) clear(&tableau_[k].cells);
  }
  clear(&costs_);
  std::swap(tableau_[row].basic, outside_[column]);
}

std::vector<double> Game::weights() const {
  std::vector<double> weights(columns_, 0);
  double sum = 0;
  for (const TableauRow& row : tableau_) {
    if (row.basic < columns_) sum += weights[row.basic] = std::max(row.cells.back(), 0.0);
  }
  for (double& weight : weights) weight /= sum;
  return weights;
}

double Game::value() const { return bound_ * (1 / costs_.back() - 1); }

}  // namespace tw::balance
