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
  const bool first = lines_.empty();
  if (first) {
    costs_.assign(columns_ + 1, -1);
    costs_.back() = 0;
    for (int32_t i = 0; i < columns_; ++i) outside_.push_back(i);
  }
  const auto paid = [&](int32_t variable) { return variable < columns_ ? 1 + payoffs[variable] / bound_ : 0; };
  Line made{{}, columns_ + static_cast<int32_t>(lines_.size())};
  for (const int32_t variable : outside_) made.cells.push_back(paid(variable));
  made.cells.push_back(1);
  for (const Line& line : lines_) {
    const double factor = paid(line.basic);
    if (factor == 0) continue;
    for (int32_t i = 0; i <= columns_; ++i) made.cells[i] -= factor * line.cells[i];
  }
  lines_.push_back(std::move(made));
  if (first) {
    const auto& cells = lines_[0].cells;
    pivot(0, static_cast<int32_t>(std::min_element(cells.begin(), cells.end() - 1) - cells.begin()));
    return true;
  }
  // No cost is negative; lines whose right-hand side is negative leave.
  for (int32_t i = 0; i < kPivots; ++i) {
    size_t leaves = 0;
    for (size_t k = 1; k < lines_.size(); ++k) {
      if (lines_[k].cells.back() < lines_[leaves].cells.back()) leaves = k;
    }
    const auto& cells = lines_[leaves].cells;
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

void Game::pivot(size_t line, int32_t column) {
  auto& chosen = lines_[line].cells;
  const double by = 1 / chosen[column];
  for (double& cell : chosen) cell *= by;
  chosen[column] = by;
  const auto clear = [&](std::vector<double>* cells) {
    const double factor = (*cells)[column];
    if (factor == 0) return;
    (*cells)[column] = 0;
    for (int32_t i = 0; i <= columns_; ++i) (*cells)[i] -= factor * chosen[i];
  };
  for (size_t k = 0; k < lines_.size(); ++k) {
    if (k != line) clear(&lines_[k].cells);
  }
  clear(&costs_);
  std::swap(lines_[line].basic, outside_[column]);
}

std::vector<double> Game::weights() const {
  std::vector<double> weights(columns_, 0);
  double sum = 0;
  for (const Line& line : lines_) {
    if (line.basic < columns_) sum += weights[line.basic] = std::max(line.cells.back(), 0.0);
  }
  for (double& weight : weights) weight /= sum;
  return weights;
}

double Game::value() const { return bound_ * (1 / costs_.back() - 1); }

}  // namespace tw::balance
