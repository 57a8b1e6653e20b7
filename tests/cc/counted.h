// Routings of high throughput, on all ranks of a world, and what the documentation says about their counts.
#pragma once

#include <algorithm>
#include <vector>

#include "core/group.h"
#include "harness.h"

namespace tw::test {

// A payload that names its token: {source, token}. Combined rows are one number.
inline twGroupConfig_t counting(int experts, int top_k, int max_tokens) {
  twGroupConfig_t config = make_config(experts, top_k, max_tokens, 1);
  config.mode = twHighThroughput;
  config.payloads[0] = {twInt32, 2};
  return config;
}

// One routing of all ranks, and what the documentation says about its counts.
class Counted {
 public:
  Counted(const World& world, const std::vector<int>& tokens, uint32_t seed)
      : handles(world.size()), world_(world), traffic_(make_traffic(world.config, tokens, seed)) {
    for (int rank = 0; rank < world.size(); ++rank) {
      if (world[rank] == nullptr) continue;  // killed
      const twTensor_t ids = ids_of(rank);
      EXPECT_TW(twSuccess, twHandleCreate(&handles[rank], world[rank], &ids, nullptr, nullptr));
    }
  }
  ~Counted() {
    for (int rank = 0; rank < world_.size(); ++rank) {
      if (world_[rank] == nullptr || handles[rank] == nullptr) continue;  // a group's end frees its handles
      EXPECT_TW(twSuccess, twHandleDestroy(handles[rank]));
    }
  }
  Counted(const Counted&) = delete;
  Counted& operator=(const Counted&) = delete;

  twResult_t exchange(int rank, bool send_only = false, int32_t lane = -1) {
    twCountsInput_t input = TW_COUNTS_INPUT_INIT;
    input.lane = lane;
    input.send_only = send_only ? 1 : 0;
    input.max_recv_tokens = max_recv_tokens;
    if (!row_alignment.empty()) input.row_alignment = row_alignment[rank];
    return twExchangeCounts(world_[rank], handles[rank], &input);
  }
  twResult_t complete(int rank) { return twComplete(world_[rank], handles[rank], nullptr); }

  void send() {
    for (int rank = 0; rank < world_.size(); ++rank) EXPECT_TW(twSuccess, exchange(rank, true)) << "rank " << rank;
  }
  void complete() {
    for (int rank = 0; rank < world_.size(); ++rank) {
      EXPECT_TW(twSuccess, complete(rank)) << "rank " << rank;
      expect_counts(rank);
    }
  }
  void exchange() { send(), complete(); }

  void expect_counts(int rank) const {
    SCOPED_TRACE(::testing::Message() << "rank " << rank);
    const int ranks = world_.size();
    const Counts& counts = handles[rank]->counts;
    std::vector<int32_t> from(ranks, -1);
    int32_t total = -1;
    EXPECT_TW(twSuccess, twHandleNumRecvTokens(handles[rank], from.data(), &total));
    int64_t begin = 0;
    for (int source = 0; source < ranks; ++source) {
      EXPECT_EQ(from[source], kept(source, rank));
      EXPECT_EQ(counts.source[source], begin);
      begin += kept(source, rank);
      for (int to = 0; to < ranks; ++to) EXPECT_EQ(counts.at(world_[rank]->shape(), source, to), kept(source, to));
    }
    EXPECT_EQ(total, begin);
    for (int to = 0; to < ranks; ++to) {
      int64_t before = 0;
      for (int source = 0; source < rank; ++source) before += kept(source, to);
      EXPECT_EQ(counts.begin[to], before) << "at rank " << to;
    }
    int64_t rows = -1;
    EXPECT_TW(twSuccess, twHandleNumRecvRows(handles[rank], twFlat, &rows));
    EXPECT_EQ(rows, begin);
    std::vector<int32_t> by_expert(world_.homes.held[rank] + 1, -7);
    EXPECT_TW(twSuccess, twHandleNumExpertRows(handles[rank], by_expert.data()));
    EXPECT_EQ(by_expert.back(), -7) << "there are as many as local experts";
    int64_t padded = 0;
    const int32_t alignment = alignment_of(rank);
    for (int32_t expert = 0; expert < world_.homes.held[rank]; ++expert) {
      EXPECT_EQ(counts.experts[expert], wanted_of(rank, expert)) << "expert " << expert;
      EXPECT_EQ(by_expert[expert], wanted_of(rank, expert)) << "expert " << expert;
      padded += (wanted_of(rank, expert) + alignment - 1) / alignment * alignment;
    }
    EXPECT_TW(twSuccess, twHandleNumRecvRows(handles[rank], twGrouped, &rows));
    EXPECT_EQ(rows, padded);
  }

  // There and back, staged: every row at its place, and as many partials of 1 in each sum as were not dropped.
  void use(twLayout_t layout, bool by_column = false) {
    std::vector<twDispatchOutput_t> received(world_.size(), twDispatchOutput_t(TW_DISPATCH_OUTPUT_INIT));
    std::vector<std::vector<int32_t>> rows(world_.size()), tokens(world_.size());
    for (int rank = 0; rank < world_.size(); ++rank) {
      for (int32_t t = 0; t < traffic_.tokens[rank]; ++t) tokens[rank].insert(tokens[rank].end(), {rank, t});
      tokens[rank].push_back(0);  // never NULL
      twDispatchInput_t input = TW_DISPATCH_INPUT_INIT;
      input.send_only = 1;
      input.payloads[0] = tensor(tokens[rank].data(), twInt32, {traffic_.tokens[rank], 2});
      int64_t n = 0;
      EXPECT_TW(twSuccess, twHandleNumRecvRows(handles[rank], layout, &n));
      const int64_t column = (n + 3) / 4 * 4;
      rows[rank].assign(2 * (by_column ? column : n) + 1, -1);
      received[rank].layout = layout;
      received[rank].column_major[0] = by_column ? 1 : 0;
      received[rank].payloads[0] =
          by_column ? tensor(rows[rank].data(), twInt32, {2, column}) : tensor(rows[rank].data(), twInt32, {n, 2});
      EXPECT_TW(twSuccess, twDispatch(world_[rank], handles[rank], &input, &received[rank]));
    }
    for (int rank = 0; rank < world_.size(); ++rank) {
      EXPECT_TW(twSuccess, complete(rank));
      rows[rank].pop_back();
      const std::vector<int32_t> want = layout == twFlat ? flat(rank) : grouped(rank);
      EXPECT_EQ(rows[rank], by_column ? columns(want) : want) << "rank " << rank;
    }
    combine(layout);
  }

  std::vector<twHandle_t> handles;
  // Of the exchange of counts, in place of the group's.
  int32_t max_recv_tokens = 0;         // 0: none
  std::vector<int32_t> row_alignment;  // by rank; empty, or 0: none

 private:
  int32_t alignment_of(int rank) const {
    const int32_t own = row_alignment.empty() ? 0 : row_alignment[rank];
    return own > 0 ? own : std::max(1, world_.config.row_alignment);
  }
  twTensor_t ids_of(int rank) {
    return tensor(traffic_.ids[rank].data(), twInt32, {traffic_.tokens[rank], world_.config.top_k});
  }
  int32_t id(int source, int token, int k) const { return traffic_.ids[source][token * world_.config.top_k + k]; }
  bool goes(int source, int token, int to) const {
    for (int k = 0; k < world_.config.top_k; ++k) {
      if (world_.homes.here(id(source, token, k), to)) return true;
    }
    return false;
  }
  int32_t wanted(int source, int to) const {
    int32_t rows = 0;
    for (int token = 0; token < traffic_.tokens[source]; ++token) rows += goes(source, token, to) ? 1 : 0;
    return rows;
  }
  // Room is for the first sources.
  int32_t kept(int source, int to) const {
    const int32_t named = max_recv_tokens > 0 ? max_recv_tokens : world_.config.max_recv_tokens;
    int32_t room = named > 0 ? named : 1 << 20;
    for (int before = 0; before < source; ++before) room -= std::min(room, wanted(before, to));
    return std::min(room, wanted(source, to));
  }
  // Dropped rows too.
  int32_t wanted_of(int rank, int32_t local) const {
    int32_t rows = 0;
    for (const std::vector<int32_t>& ids : traffic_.ids) {
      for (const int32_t expert : ids) {
        rows += world_.homes.here(expert, rank) && world_.homes.slot[expert] == local ? 1 : 0;
      }
    }
    return rows;
  }
  // visit(source, token) of each row that arrives, in order.
  template <class Visit>
  void arrivals(int rank, Visit&& visit) const {
    for (int source = 0; source < world_.size(); ++source) {
      int32_t slot = 0;
      for (int token = 0; token < traffic_.tokens[source]; ++token) {
        if (goes(source, token, rank) && slot++ < kept(source, rank)) visit(source, token);
      }
    }
  }
  std::vector<int32_t> flat(int rank) const {
    std::vector<int32_t> rows;
    arrivals(rank, [&](int source, int token) { rows.insert(rows.end(), {source, token}); });
    return rows;
  }
  std::vector<int32_t> grouped(int rank) const {
    std::vector<int32_t> rows;
    const int32_t alignment = alignment_of(rank);
    size_t end = 0;
    for (int32_t local = 0; local < world_.homes.held[rank]; ++local) {
      arrivals(rank, [&](int source, int token) {
        for (int k = 0; k < world_.config.top_k; ++k) {
          const int32_t expert = id(source, token, k);
          if (!world_.homes.here(expert, rank) || world_.homes.slot[expert] != local) continue;
          rows.insert(rows.end(), {source, token});
        }
      });
      end += 2 * static_cast<size_t>((wanted_of(rank, local) + alignment - 1) / alignment * alignment);
      rows.resize(end, 0);
    }
    return rows;
  }
  // Rows of two elements as two columns of whole 16 bytes.
  static std::vector<int32_t> columns(const std::vector<int32_t>& rows) {
    const size_t column = (rows.size() / 2 + 3) / 4 * 4;
    std::vector<int32_t> made(2 * column, 0);
    for (size_t i = 0; i < rows.size(); ++i) made[i % 2 * column + i / 2] = rows[i];
    return made;
  }
  void combine(twLayout_t layout) {
    std::vector<std::vector<float>> rows(world_.size()), sums(world_.size());
    for (int rank = 0; rank < world_.size(); ++rank) {
      int64_t n = 0;
      EXPECT_TW(twSuccess, twHandleNumRecvRows(handles[rank], layout, &n));
      rows[rank].assign(n + 1, 1.0f);
      sums[rank].assign(traffic_.tokens[rank] + 1, -1.0f);
      twCombineInput_t input = TW_COMBINE_INPUT_INIT;
      input.layout = layout;
      input.send_only = 1;
      input.rows = tensor(rows[rank].data(), twFloat32, {n, 1});
      twCombineOutput_t output = TW_COMBINE_OUTPUT_INIT;
      output.tokens = tensor(sums[rank].data(), twFloat32, {traffic_.tokens[rank], 1});
      EXPECT_TW(twSuccess, twCombine(world_[rank], handles[rank], &input, &output));
    }
    std::vector<std::vector<float>> want(world_.size());
    for (int rank = 0; rank < world_.size(); ++rank) want[rank].assign(traffic_.tokens[rank], 0.0f);
    for (int rank = 0; rank < world_.size(); ++rank) {
      arrivals(rank, [&](int source, int token) {
        for (int k = 0; k < world_.config.top_k; ++k) {
          if (!world_.homes.here(id(source, token, k), rank)) continue;
          want[source][token] += 1.0f;
          if (layout == twFlat) break;
        }
      });
    }
    for (int rank = 0; rank < world_.size(); ++rank) {
      EXPECT_TW(twSuccess, complete(rank));
      sums[rank].pop_back();
      EXPECT_EQ(sums[rank], want[rank]) << "rank " << rank;
    }
  }

  const World& world_;
  Traffic traffic_;
};

}  // namespace tw::test
