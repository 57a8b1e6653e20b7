// One rank's part in an exchange: what it gives, and what it must get.
#include <cstring>

#include "harness.h"

namespace tw::test {
namespace {

int dtype_size(twDtype_t dtype) {
  switch (dtype) {
    case twInt64:
    case twUint64:
    case twFloat64:
      return 8;
    case twInt32:
    case twUint32:
    case twFloat32:
      return 4;
    case twInt16:
    case twUint16:
    case twFloat16:
    case twBfloat16:
      return 2;
    default:
      return 1;
  }
}

}  // namespace

Side::Side(const World& world, const Traffic& traffic, int rank, const Style& style, uint32_t salt, void* memory)
    : world_(world), traffic_(traffic), rank_(rank), style_(style), salt_(salt) {
  const int64_t tokens = traffic.tokens[rank];
  const twTensor_t ids = tensor(const_cast<int32_t*>(traffic.ids[rank].data()), twInt32, {tokens, world.config.top_k});
  const twTensor_t weights =
      tensor(const_cast<float*>(traffic.weights[rank].data()), twFloat32, {tokens, world.config.top_k});
  EXPECT_TW(twSuccess, twHandleCreate(&handle, world[rank], &ids, &weights, memory));
  input.size = sizeof input;
  input.bound = style.bound;
  input.lane = style.lane;
  payloads_.resize(world.config.num_payloads);
  for (int q = 0; q < world.config.num_payloads; ++q) {
    payloads_[q].resize(tokens * row_bytes(q) + 1);  // never NULL
    input.payloads[q] =
        tensor(payloads_[q].data(), world.config.payloads[q].dtype, {tokens, world.config.payloads[q].elements});
  }
  renew(salt);
  const int64_t elements = world.config.combine_elements;
  rows.size = sizeof rows;
  sums.size = sizeof sums;
  sums_.assign(tokens * elements * float_bytes(style.out) + 4, 0xff);
  sums.tokens = tensor(sums_.data(), style.out, {tokens, elements});
}

Side::~Side() {
  if (handle == nullptr || world_[rank_] == nullptr) return;  // a group's end frees its handles
  EXPECT_TW(twSuccess, twHandleDestroy(handle));
}

int64_t Side::row_bytes(int q) const {
  return world_.config.payloads[q].elements * dtype_size(world_.config.payloads[q].dtype);
}

uint8_t Side::payload_byte(int q, int source, int token, int64_t j) const {
  return static_cast<uint8_t>(mix({salt_, static_cast<uint64_t>(q), static_cast<uint64_t>(source),
                                   static_cast<uint64_t>(token), static_cast<uint64_t>(j)}) >>
                              7);
}

void Side::renew(uint32_t salt) {
  salt_ = salt;
  for (size_t q = 0; q < payloads_.size(); ++q) {
    const int64_t bytes = row_bytes(static_cast<int>(q));
    for (int64_t i = 0; i < traffic_.tokens[rank_] * bytes; ++i) {
      payloads_[q][i] = payload_byte(static_cast<int>(q), rank_, static_cast<int>(i / bytes), i % bytes);
    }
  }
}

std::vector<Side::Arrival> Side::arrivals() const {
  std::vector<Arrival> found;
  for (int source = 0; source < world_.size(); ++source) {
    int slot = 0;
    for (int token = 0; token < traffic_.tokens[source]; ++token) {
      bool wanted = false;
      for (int k = 0; k < world_.config.top_k; ++k) wanted |= world_.homes.here(id(source, token, k), rank_);
      if (wanted) found.push_back({source, slot++, token});
    }
  }
  return found;
}

std::vector<Side::Place> Side::places() const {
  std::vector<Place> found;
  std::vector<int64_t> next(world_.homes.held[rank_], 0);
  for (const Arrival& row : arrivals()) {
    for (int k = 0; k < world_.config.top_k; ++k) {
      const int32_t expert = id(row.source, row.token, k);
      if (!world_.homes.here(expert, rank_)) continue;
      const int32_t local = world_.homes.slot[expert];
      found.push_back({local, next[local]++, row.source, row.token, k});
    }
  }
  return found;
}

void Side::give_memory() {
  const bool rank_major = style_.layout == twRankMajor;
  const int64_t blocks = rank_major ? world_.size() : world_.homes.held[rank_];
  const int64_t rows_each = rank_major ? bound() : static_cast<int64_t>(world_.size()) * bound();
  const int64_t per_row = rank_major ? world_.config.top_k : 1;
  const auto block = [&](int64_t bytes) {
    memory_.emplace_back(bytes + 8, 0xab);
    return memory_.back().data();
  };
  memory_.clear();
  for (int q = 0; q < world_.config.num_payloads; ++q) {
    received.payloads[q] = tensor(block(blocks * rows_each * row_bytes(q)), world_.config.payloads[q].dtype,
                                  {blocks, rows_each, world_.config.payloads[q].elements});
  }
  const twDtype_t id_dtype = world_.config.id_dtype;
  received.ids =
      tensor(block(blocks * rows_each * per_row * dtype_size(id_dtype)), id_dtype, {blocks, rows_each, per_row});
  received.weights = tensor(block(blocks * rows_each * per_row * 4), twFloat32, {blocks, rows_each, per_row});
  received.counts = tensor(block(blocks * 4), twInt32, {blocks});
}

twResult_t Side::dispatch(bool send_only) {
  received = {};
  received.size = sizeof received;
  received.layout = style_.layout;
  if (style_.own_memory) give_memory();
  input.send_only = send_only;
  return twDispatch(world_[rank_], handle, &input, &received);
}

twResult_t Side::complete() { return twComplete(world_[rank_], handle, nullptr); }

void Side::give_bias(twDtype_t dtype, bool in_place) {
  const int64_t tokens = traffic_.tokens[rank_];
  const int64_t elements = world_.config.combine_elements;
  const int64_t stride = elements + (in_place ? 0 : 3);
  bias_.assign(tokens * elements + 1, 0.0f);
  bias_rows_.assign(tokens * stride * float_bytes(dtype) + 4, 0xff);
  for (int64_t i = 0; i < tokens * elements; ++i) {
    bias_[i] = rounded(dtype, answer(salt_ + 1, rank_, 0, 0, i));
    store(dtype, bias_rows_.data(), i / elements * stride + i % elements, bias_[i]);
  }
  rows.bias = tensor(in_place ? sums.tokens.data : bias_rows_.data(), dtype, {tokens, elements});
  rows.bias.stride[0] = stride;
}

twResult_t Side::combine(bool send_only) {
  write_rows();
  rows.send_only = send_only;
  std::fill(sums_.begin(), sums_.end(), 0xff);
  if (!bias_.empty() && rows.bias.data == sums_.data()) std::copy_n(bias_rows_.begin(), sums_.size(), sums_.begin());
  return twCombine(world_[rank_], handle, &rows, &sums);
}

// In rank_major a row is the sum over the rank's experts, k ascending, as a module returns it.
float Side::local_sum(int source, int token, int rank, int64_t i) const {
  Total total;
  for (int k = 0; k < world_.config.top_k; ++k) {
    const int32_t expert = id(source, token, k);
    if (world_.homes.here(expert, rank)) total.add(answer(salt_, source, token, expert, i));
  }
  return total.value();
}

void Side::write_rows() {
  const int64_t elements = world_.config.combine_elements;
  const bool rank_major = style_.layout == twRankMajor;
  const int64_t blocks = rank_major ? world_.size() : world_.homes.held[rank_];
  const int64_t rows_each = rank_major ? bound() : static_cast<int64_t>(world_.size()) * bound();
  rows_.assign(blocks * rows_each * elements * float_bytes(style_.rows) + 4, 0xff);  // NaN where nothing is to be read
  const bool in_place = style_.in_place && received.payloads[0].data != nullptr;
  void* const data = in_place ? received.payloads[0].data : rows_.data();
  if (rank_major) {
    for (const Arrival& row : arrivals()) {
      const int64_t at = (static_cast<int64_t>(row.source) * rows_each + row.slot) * elements;
      for (int64_t i = 0; i < elements; ++i) {
        store(style_.rows, data, at + i, local_sum(row.source, row.token, rank_, i));
      }
    }
  } else {
    for (const Place& row : places()) {
      const int64_t at = (row.expert * rows_each + row.place) * elements;
      const int32_t expert = id(row.source, row.token, row.k);
      for (int64_t i = 0; i < elements; ++i) {
        store(style_.rows, data, at + i, answer(salt_, row.source, row.token, expert, i));
      }
    }
  }
  rows.layout = style_.layout;
  rows.weighting = style_.weighting;
  rows.rows = tensor(data, style_.rows, {blocks, rows_each, elements});
}

float Side::partial(int token, int rank, int64_t i, bool* any) const {
  const bool weighted = style_.weighting == twWeightTopk;
  Total sum;
  Total weights;
  for (int k = 0; k < world_.config.top_k; ++k) {
    const int32_t expert = id(rank_, token, k);
    if (!world_.homes.here(expert, rank)) continue;
    const float row = rounded(style_.rows, answer(salt_, rank_, token, expert, i));
    sum.add(weighted ? weight(rank_, token, k) * row : row);
    weights.add(weight(rank_, token, k));
  }
  *any = !sum.empty();
  float value = sum.value();
  if (style_.layout == twRankMajor) {
    value = rounded(style_.rows, local_sum(rank_, token, rank, i));
    if (weighted) value = weights.value() * value;
  }
  return rounded(world_.config.combine_dtype, value);
}

// Adds what the owner sums of an element where rows return per expert.
void Side::add_choices(int token, int64_t i, Total* total) const {
  const auto* const given = static_cast<const float*>(rows.weights.data);
  for (int k = 0; k < world_.config.top_k; ++k) {
    const int32_t expert = id(rank_, token, k);
    if (expert < 0) continue;
    const float row =
        rounded(world_.config.combine_dtype, rounded(style_.rows, answer(salt_, rank_, token, expert, i)));
    const float weight = given != nullptr ? given[token * rows.weights.stride[0] + k] : this->weight(rank_, token, k);
    total->add(given != nullptr || style_.weighting == twWeightTopk ? weight * row : row);
  }
}

// Adds what the owner sums of an element where a partial of each rank returns: these or, by domain, their folds.
void Side::add_partials(int token, int64_t i, Total* total) const {
  const int domain = world_.config.domain < world_.size() ? world_.config.domain : 0;
  Total fold;
  for (int rank = 0; rank < world_.size(); ++rank) {
    bool any = false;
    const float term = partial(token, rank, i, &any);
    if (any) (domain > 0 ? fold : *total).add(term);
    const bool last = domain > 0 && (rank % domain == domain - 1 || rank + 1 == world_.size());
    if (!last || fold.empty()) continue;
    total->add(rounded(world_.config.combine_dtype, fold.value()));
    fold = {};
  }
}

void Side::expect_tokens() const {
  const int64_t elements = world_.config.combine_elements;
  const int bytes = float_bytes(style_.out);
  for (int token = 0; token < traffic_.tokens[rank_]; ++token) {
    for (int64_t i = 0; i < elements; ++i) {
      Total total;
      if (!bias_.empty()) total.add(bias_[token * elements + i]);
      world_.config.combine_rows == twRowPerExpert ? add_choices(token, i, &total) : add_partials(token, i, &total);
      uint32_t want = 0;
      uint32_t got = 0;
      store(style_.out, &want, 0, total.value());
      std::memcpy(&got, sums_.data() + (token * elements + i) * bytes, bytes);
      ASSERT_EQ(got, want) << "rank " << rank_ << ", token " << token << ", element " << i << ", sum " << total.value();
    }
  }
}

int32_t Side::shown(int32_t id) const {
  if (world_.config.id_space == twIdGlobal) return id < 0 ? world_.config.invalid_id : id;
  return world_.homes.here(id, rank_) ? world_.homes.slot[id] : world_.config.invalid_id;
}

int64_t Side::id_at(int64_t i) const {
  return received.ids.dtype == twInt64 ? static_cast<const int64_t*>(received.ids.data)[i]
                                       : static_cast<const int32_t*>(received.ids.data)[i];
}

void Side::expect_payload(int64_t row, int source, int token) const {
  for (int q = 0; q < world_.config.num_payloads; ++q) {
    if (received.payloads[q].data == nullptr) continue;
    const int64_t bytes = row_bytes(q);
    const auto* const data = static_cast<const uint8_t*>(received.payloads[q].data) + row * bytes;
    for (int64_t j = 0; j < bytes; ++j) {
      ASSERT_EQ(data[j], payload_byte(q, source, token, j))
          << "rank " << rank_ << ", payload " << q << ", row " << row << ", byte " << j << " of token " << token
          << " from rank " << source;
    }
  }
}

void Side::expect_received() const {
  ASSERT_NE(received.counts.data, nullptr) << "rank " << rank_ << " has not dispatched";
  ASSERT_NO_FATAL_FAILURE(style_.layout == twRankMajor ? expect_rank_major() : expect_expert_major());
  std::vector<int32_t> want(world_.size(), 0);
  for (const Arrival& row : arrivals()) ++want[row.source];
  std::vector<int32_t> counts(world_.size(), -1);
  int32_t total = -1;
  EXPECT_TW(twSuccess, twHandleNumRecvTokens(handle, counts.data(), &total));
  EXPECT_EQ(counts, want) << "rank " << rank_;
  EXPECT_EQ(total, static_cast<int32_t>(arrivals().size())) << "rank " << rank_;
}

void Side::expect_rank_major() const {
  const int top_k = world_.config.top_k;
  std::vector<std::vector<int>> tokens(world_.size());
  for (const Arrival& row : arrivals()) tokens[row.source].push_back(row.token);
  const auto* const weights = static_cast<const float*>(received.weights.data);
  for (int source = 0; source < world_.size(); ++source) {
    const auto count = static_cast<int>(tokens[source].size());
    ASSERT_EQ(static_cast<const int32_t*>(received.counts.data)[source], count) << rank_ << " from " << source;
    for (int p = 0; p < bound(); ++p) {
      const int64_t row = static_cast<int64_t>(source) * bound() + p;
      for (int k = 0; k < top_k; ++k) {
        const bool filled = p < count;
        const int64_t at = row * top_k + k;
        ASSERT_EQ(id_at(at), filled ? shown(id(source, tokens[source][p], k)) : world_.config.invalid_id)
            << "rank " << rank_ << ", slot " << p << " of rank " << source << ", k " << k;
        ASSERT_EQ(weights[at], filled ? weight(source, tokens[source][p], k) : 0.0f) << rank_;
      }
      if (p >= count) continue;
      ASSERT_NO_FATAL_FAILURE(expect_payload(row, source, tokens[source][p]));
    }
  }
}

void Side::expect_expert_major() const {
  const int64_t rows_each = static_cast<int64_t>(world_.size()) * bound();
  const int held = world_.homes.held[rank_];
  std::vector<int32_t> counts(held, 0);
  for (const Place& row : places()) {
    ++counts[row.expert];
    const int64_t at = row.expert * rows_each + row.place;
    ASSERT_NO_FATAL_FAILURE(expect_payload(at, row.source, row.token));
    if (received.ids.data == nullptr) continue;
    const int32_t expert = id(row.source, row.token, row.k);
    ASSERT_EQ(id_at(at), shown(expert)) << "rank " << rank_ << ", row " << at;
    ASSERT_EQ(static_cast<const float*>(received.weights.data)[at], weight(row.source, row.token, row.k)) << rank_;
  }
  for (int expert = 0; expert < held; ++expert) {
    ASSERT_EQ(static_cast<const int32_t*>(received.counts.data)[expert], counts[expert]) << "expert " << expert;
    for (int64_t place = counts[expert]; received.ids.data != nullptr && place < rows_each; ++place) {
      ASSERT_EQ(id_at(expert * rows_each + place), world_.config.invalid_id) << "expert " << expert;
      ASSERT_EQ(static_cast<const float*>(received.weights.data)[expert * rows_each + place], 0.0f);
    }
  }
}

}  // namespace tw::test
