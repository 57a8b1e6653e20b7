// Launch plans: pure functions of a call, a shape and a budget, so they are checked here without a device. Whatever the
// call, each row is some warp's, and all blocks fit (S8); and the calls that the tuning was made for get the kernels
// and the SMs that were measured.
#include <random>

#include "cuda/plan/by_expert.h"
#include "cuda/plan/collective.h"
#include "cuda/plan/combine.h"
#include "cuda/plan/dispatch.h"
#include "cuda/plan/tiles.h"
#include "harness.h"

namespace tw::test {
namespace {

using namespace tw::cuda;

Shape shape_of(int ranks, int max_tokens, bool exact = false, uint64_t row_bytes = 14336) {
  Shape shape;
  shape.ranks = ranks;
  shape.experts = 256;
  shape.top_k = 8;
  shape.max_tokens = max_tokens;
  shape.channels = 1;
  shape.payloads = 1;
  shape.payload_bytes[0] = shape.combine_bytes = row_bytes;
  shape.packet_tokens = std::min(max_tokens, 2048 / ranks);
  shape.chunk_rows = chunk_rows_of(row_bytes);
  if (exact) shape.recv_rows = ranks * max_tokens;
  return shape;
}

Budget budget_of(const Shape& shape, int sm_limit = 0, int sms = 132) {
  Budget budget;
  const Status made = make_budget({sms, 9}, shape, sm_limit, 1, false, &budget);
  EXPECT_TRUE(made.ok()) << made.text();
  return budget;
}

DispatchParams dispatch_of(const Budget& budget, const Shape& shape, int tokens, bool usual = true,
                           bool known = false) {
  static GroupMarks marks;
  DispatchParams p{};
  p.handle.marks = shape.exact() ? &marks : nullptr;
  p.tokens = tokens;
  p.bound = shape.max_tokens;
  p.send = p.receive = 1;
  const DispatchFacts facts{dispatch_words(shape), usual, known};
  for (int q = 0; q < shape.payloads; ++q) {
    p.payloads[q].vectors = static_cast<uint32_t>(shape.payload_bytes[q] / 16);
  }
  plan_dispatch(budget, shape, facts, &p);
  return p;
}

CombineParams combine_of(const Budget& budget, const Shape& shape, int tokens, bool plain = true, bool apart = true) {
  CombineParams p{};
  p.tokens = tokens;
  p.bound = shape.max_tokens;
  p.send = p.receive = 1;
  p.plain = plain;
  p.expert_major = !plain;
  p.own_direct = 1;
  p.rows_dtype = p.wire_dtype = p.out_dtype = twBfloat16;
  p.vectors_fit = p.sums_fit = p.words_fit = p.word_sums_fit = 1;
  p.vectors = static_cast<uint32_t>(shape.combine_bytes / 16);
  plan_combine(budget, shape, {apart}, &p);
  return p;
}

void expect_fits(const Budget& budget, const Roles& roles) {
  EXPECT_GE(roles.sending, 1);
  EXPECT_GE(roles.receiving, 1);
  EXPECT_LE(roles.grid(), budget.max_grid) << "S8: blocks that wait must all be on the device at once";
}

// Wider tiles cover the same vectors as those that they stand for.
void expect_covers(const Tiles& tiles, const WideTiles& wide, int32_t rows) {
  ASSERT_GE(tiles.per_row.divisor, 1u);
  EXPECT_GE(uint64_t{tiles.per_row.divisor} * tiles.tile_groups, tiles.groups) << "a part of each row is nobody's";
  if (wide.rows > 0) {
    EXPECT_GE(uint64_t{wide.per_row.divisor} * wide.parts, tiles.per_row.divisor) << "a part of a wide row is nobody's";
  }
  EXPECT_LE(wide.rows, static_cast<uint32_t>(std::max(rows, 0)));
}

// What a call in a layout by expert is planned as, if its dispatch is one kernel.
struct ByExpert {
  bool is;
  ByExpertParams p;
};
ByExpert by_expert_of(const Budget& budget, const Shape& shape, int tokens, const ByExpertFacts& facts,
                      bool usual = true, bool send_only = false) {
  ByExpert made{};
  made.p.call = dispatch_of(budget, shape, tokens, usual);
  if (send_only) {
    made.p.call.receive = 0;
    plan_dispatch(budget, shape, {dispatch_words(shape), usual, false}, &made.p.call);
  }
  made.p.call.at.bytes = 4000;
  made.is = plan_by_expert(budget, shape, facts, &made.p);
  return made;
}
ByExpertFacts facts_of(const Shape& shape) { return {true, false, 16, shape.experts / shape.ranks}; }

TEST(Plan, WhateverTheCallEachRowIsSomebodys) {
  std::mt19937 random(1);
  const auto pick = [&](int low, int high) { return std::uniform_int_distribution<int>(low, high)(random); };
  for (int i = 0; i < 2000; ++i) {
    const int ranks = pick(1, 64);
    const int max_tokens = 1 << pick(0, 13);
    const bool exact = pick(0, 2) == 0;
    Shape shape = shape_of(ranks, max_tokens, exact, 16 * static_cast<uint64_t>(pick(1, 1200)));
    shape.payloads = pick(1, 3);
    for (int q = 1; q < shape.payloads; ++q) shape.payload_bytes[q] = static_cast<uint64_t>(pick(1, 5000));
    shape.channels = pick(1, 4);
    shape.counts_loads = pick(0, 1);
    const Budget budget = budget_of(shape, pick(0, 1) == 0 ? 0 : pick(1, 132), pick(32, 160));
    const int tokens = pick(0, max_tokens);
    SCOPED_TRACE(::testing::Message() << "call " << i << ": " << ranks << " ranks, " << tokens << " of " << max_tokens
                                      << " tokens, " << budget.max_grid << " blocks");
    const bool known = exact && pick(0, 1) == 0;
    const DispatchParams d = dispatch_of(budget, shape, tokens, pick(0, 3) != 0, known);
    expect_fits(budget, d.roles);
    EXPECT_GE(d.first_packet, 0);
    EXPECT_LE(d.first_packet, std::max(tokens, 0));
    EXPECT_LE(tokens - d.first_packet, std::max<int>(budget.packet_tokens, 0)) << "there is no room for more packets";
    expect_covers(d.tiles, d.wide, d.first_packet);
    for (int q = 0; q < shape.payloads; ++q) {
      EXPECT_GE(uint64_t{d.payloads[q].per_tile} * d.tiles.per_row.divisor, d.payloads[q].vectors);
    }
    EXPECT_GE(d.early, 0);
    const CombineParams c = combine_of(budget, shape, tokens, pick(0, 3) != 0, pick(0, 3) != 0);
    expect_fits(budget, c.roles);
    expect_covers(c.tiles, c.wide, tokens - c.tail_packets);
    EXPECT_GE(uint64_t{c.per_tile} * c.tiles.per_row.divisor, c.vectors);
    EXPECT_GE(static_cast<uint64_t>(c.pushed_parts) * c.pushed, c.vectors) << "a part of a row is not sent back";
    EXPECT_GE(c.turn_chunks, 1);
    EXPECT_LE(c.drawn, kChunks / 2);
    EXPECT_LE(c.single, c.wide.tiles());
  }
}

// One kernel brings rows to their experts where it can, and nowhere else: it would read or write what is not there.
TEST(Plan, RowsGoStraightToTheirExperts) {
  for (const int ranks : {2, 3, 4, 8, 32}) {
    for (const int tokens : {1, 8, 33, 128, 512, 1024}) {
      const Shape shape = shape_of(ranks, tokens);
      const Budget budget = budget_of(shape);
      SCOPED_TRACE(::testing::Message() << ranks << " ranks, " << tokens << " tokens");
      const ByExpert found = by_expert_of(budget, shape, tokens, facts_of(shape));
      ASSERT_EQ(found.is, tokens <= 2048 / ranks) << "all that come as packets";
      if (!found.is) continue;
      const DispatchParams& p = found.p.call;
      expect_fits(budget, p.roles);
      EXPECT_EQ(p.roles.apart, 1) << "blocks that receive wait for all peers before they store anything (S7)";
      EXPECT_LE(p.tiles.tile_groups, kByExpertGroups);
      EXPECT_GE(uint64_t{p.tiles.per_row.divisor} * p.tiles.tile_groups, p.tiles.groups) << "a part is nobody's";
      EXPECT_EQ(found.p.rest.divisor, std::max(1u, p.tiles.per_row.divisor - 1));
      EXPECT_EQ(found.p.slots.divisor * found.p.ranks.divisor, static_cast<uint32_t>(ranks * tokens));
      const ByExpertScratch& at = found.p.at;
      EXPECT_GE(at.came, 4000u) << "behind what a dispatch has";
      EXPECT_LE(at.bytes, kMostShared);
      EXPECT_GE(32 * at.words, static_cast<uint32_t>(ranks * tokens)) << "each row has a bit";
      EXPECT_GT(at.pitch, at.words) << "behind the bits of an expert is its sum";
      EXPECT_EQ(at.pitch % 2, 1u);
    }
  }
}

TEST(Plan, RowsThatAreCopiedToTheirExperts) {
  const Shape shape = shape_of(4, 128);
  const Budget budget = budget_of(shape);
  const ByExpertFacts usual = facts_of(shape);
  ASSERT_TRUE(by_expert_of(budget, shape, 128, usual).is);
  const auto copied = [&](const char* why, auto&& change) {
    ByExpertFacts facts = usual;
    change(facts);
    EXPECT_FALSE(by_expert_of(budget, shape, 128, facts).is) << why;
  };
  copied("another layout", [](ByExpertFacts& facts) { facts.by_expert = false; });
  copied("columns", [](ByExpertFacts& facts) { facts.columns = true; });
  copied("rows are stored 8 bytes at a time", [](ByExpertFacts& facts) { facts.width = 4; });
  copied("a payload that is not wanted", [](ByExpertFacts& facts) { facts.width = 0; });
  copied("more experts than shared memory counts", [](ByExpertFacts& facts) { facts.local_experts = 4000; });
  EXPECT_FALSE(by_expert_of(budget, shape, 128, usual, false).is) << "a call that only the generic kernel can do";
  EXPECT_FALSE(by_expert_of(budget, shape, 128, usual, true, true).is) << "rows are received later";
  EXPECT_FALSE(by_expert_of(budget_of(shape, 24), shape, 128, usual).is) << "few SMs";
  EXPECT_FALSE(by_expert_of(budget_of(shape, 0, 1), shape, 128, usual).is) << "one block does all";
  const Shape prefill = shape_of(4, 4096);
  EXPECT_FALSE(by_expert_of(budget_of(prefill), prefill, 4096, usual).is) << "Simple rows";
  const Shape exact = shape_of(4, 128, true);
  EXPECT_FALSE(by_expert_of(budget_of(exact), exact, 128, usual).is) << "high throughput";
}

TEST(Plan, CallsThatWereMeasured) {
  const Shape decode = shape_of(2, 128);
  const Budget all = budget_of(decode);
  EXPECT_EQ(dispatch_of(all, decode, 128).kind, Kind::kPackets);
  EXPECT_EQ(dispatch_of(all, decode, 128).first_packet, 0);
  EXPECT_EQ(combine_of(all, decode, 128).kind, Kind::kPackets);
  EXPECT_EQ(combine_of(all, decode, 128, false).kind, Kind::kPackets) << "sums by expert travel as packets too";
  EXPECT_EQ(dispatch_of(all, decode, 128, false).kind, Kind::kGeneric);

  const Shape prefill = shape_of(2, 4096);
  const Budget wide = budget_of(prefill);
  EXPECT_EQ(dispatch_of(wide, prefill, 4096).kind, Kind::kUsual);
  EXPECT_EQ(dispatch_of(wide, prefill, 4096).roles.sending, 33) << "a quarter of 132 SMs fills the link";
  EXPECT_EQ(4096 - dispatch_of(wide, prefill, 4096).first_packet, 192);
  EXPECT_EQ(combine_of(wide, prefill, 4096).roles.sending, 47);

  CombineParams seen{};
  seen.tokens = seen.bound = 4096;
  seen.send = seen.receive = seen.plain = 1;
  seen.late_signal = 1;
  seen.rows_dtype = seen.wire_dtype = seen.out_dtype = twBfloat16;
  seen.vectors_fit = seen.sums_fit = seen.words_fit = seen.word_sums_fit = 1;
  seen.vectors = static_cast<uint32_t>(prefill.combine_bytes / 16);
  plan_combine(wide, prefill, {}, &seen);
  EXPECT_EQ(seen.kind, Kind::kUsual) << "rows in a bank of the window";
  EXPECT_EQ(seen.roles.sending, 47);
  Shape staged = prefill;
  staged.staged = 1;
  plan_combine(wide, staged, {}, &seen);
  EXPECT_EQ(seen.kind, Kind::kGeneric);

  const Shape exact = shape_of(2, 4096, true);
  EXPECT_EQ(dispatch_of(budget_of(exact), exact, 4096, true, true).roles.sending, 44) << "rows alone";
  EXPECT_EQ(4096 - dispatch_of(budget_of(exact), exact, 4096, true, true).first_packet, 64);

  const Budget few = budget_of(prefill, 24);
  EXPECT_EQ(dispatch_of(few, prefill, 4096).kind, Kind::kLowSm);
  EXPECT_EQ(combine_of(few, prefill, 4096).kind, Kind::kLowSm);
  EXPECT_EQ(budget_of(prefill, 33).low_sm(), true);
  EXPECT_EQ(budget_of(prefill, 34).low_sm(), false);
}

// A call with a limit of its own gets the blocks of a group with that limit, and keeps what ranks have agreed on.
TEST(Plan, ACallsOwnLimit) {
  for (const int counts_loads : {0, 1}) {
    for (const int channels : {1, 3}) {
      Shape shape = shape_of(2, 1024);
      shape.counts_loads = counts_loads;
      shape.channels = channels;
      for (const int of_group : {0, 1, 24, 100}) {
        const Budget group = budget_of(shape, of_group);
        EXPECT_EQ(limited(group, 0).max_grid, group.max_grid);
        for (const int limit : {1, 2, 24, 66, 132, INT32_MAX}) {
          SCOPED_TRACE(::testing::Message() << limit << " in place of " << of_group << ", " << channels << " channels");
          const Budget call = limited(group, limit);
          const Budget like = budget_of(shape, limit);
          EXPECT_EQ(call.max_grid, like.max_grid);
          EXPECT_EQ(call.view_grid, like.view_grid);
          EXPECT_EQ(call.loads_block, like.loads_block);
          EXPECT_EQ(call.early_views, like.early_views);
          EXPECT_EQ(call.early, group.early);
          EXPECT_LE(channels * (call.max_grid + (call.loads_block == LoadsBlock::kApart ? 1 : 0)), 132) << "S8";
          EXPECT_EQ(call.packet_tokens, group.packet_tokens) << "peers have other limits";
          EXPECT_EQ(call.summed_tail, group.summed_tail) << "peers have other limits";
          EXPECT_EQ(combine_of(call, shape, 1000).tail_packets, combine_of(group, shape, 1000).tail_packets);
          expect_fits(call, dispatch_of(call, shape, 1024).roles);
          expect_fits(call, combine_of(call, shape, 1024).roles);
        }
      }
    }
  }
}

TEST(Plan, ChannelsThatDoNotFit) {
  Shape shape = shape_of(2, 128);
  shape.channels = 5;
  Budget budget;
  EXPECT_TRUE(make_budget({132, 9}, shape, 0, 1, false, &budget).ok());
  EXPECT_EQ(budget.max_grid, 26);
  EXPECT_FALSE(budget.early) << "a kernel that comes early could take the room of another channel's";
  EXPECT_EQ(make_budget({4, 9}, shape, 0, 1, false, &budget).code, twInvalidArgument);
  EXPECT_TRUE(make_budget({132, 8}, shape_of(2, 128), 0, 1, false, &budget).ok());
  EXPECT_FALSE(budget.early) << "not before compute capability 9.0";
}

TEST(Plan, AnyDeviceHasATuning) {
  for (const int sms : {1, 80, 132, 148, 1000}) {
    for (const int ranks : {1, 2, 8, TW_MAX_RANKS}) {
      const Tuning& tuning = tuning_of(sms, ranks);
      EXPECT_GE(tuning.ranks, ranks);
      EXPECT_NE(std::string(tuning.source), "") << "a number without a record is a guess";
    }
  }
}

// A gather's rows fit where packets are; where they do not, its chunks do.
TEST(Plan, AGatherOfAnyBound) {
  for (const int bound : {1, 32, 512, 4096}) {
    Shape shape = shape_of(4, 4096);
    WindowMap map;
    ASSERT_TRUE(WindowMap::make(shape, &map));
    CollectiveParams p{};
    p.bound = bound;
    p.send = p.receive = p.all_sizes = 1;
    p.tensors = 1;
    p.rows[0].row_bytes = static_cast<uint32_t>(shape.combine_bytes);
    p.rows[0].parts = 7;
    p.rows[0].width = 16;
    const Budget budget = budget_of(shape);
    plan_collective(budget, map, {}, &p);
    expect_fits(budget, p.roles);
    EXPECT_EQ(p.by_packets != 0, bound <= 512);
    EXPECT_EQ(p.own_sent != 0, bound <= 128);
  }
}

TEST(Plan, Described) {
  twGroupConfig_t config = make_config(256, 8, 128);
  twPlanQuery_t query = TW_PLAN_QUERY_INIT;
  size_t needed = 0;
  ASSERT_TW(twSuccess, twDescribePlan(&config, 4, &query, nullptr, 0, &needed));
  std::string text(needed, '#');
  ASSERT_TW(twSuccess, twDescribePlan(&config, 4, &query, text.data(), text.size(), &needed));
  EXPECT_EQ(text.back(), '\0');
  EXPECT_NE(text.find("dispatch: kernel\t"), std::string::npos) << text;
  std::string part(8, '#');
  ASSERT_TW(twSuccess, twDescribePlan(&config, 4, &query, part.data(), part.size(), &needed));
  EXPECT_EQ(part.substr(0, 7), text.substr(0, 7));
  EXPECT_EQ(part[7], '\0');
  query.tokens = 129;
  EXPECT_TW(twInvalidArgument, twDescribePlan(&config, 4, &query, nullptr, 0, &needed));
  EXPECT_TRUE(says("query.tokens is 129; it must be from 0 to config.max_tokens, 128"));
  query.tokens = -1;
  query.device_sms = 2;
  config.lanes = 3;
  EXPECT_TW(twInvalidArgument, twDescribePlan(&config, 4, &query, nullptr, 0, &needed));
  EXPECT_TRUE(says("lanes must be from 1 to 2"));
}

}  // namespace
}  // namespace tw::test
