// The layout of a routing: each output by itself, ids of any stride, structs of another age, and what is refused.
// tests/py/test_routing_layout.py has its behaviour on every backend.
#include "exchange/routing_layout.h"

#include <cstddef>
#include <cstring>

#include "counted.h"

namespace tw::test {
namespace {

// Outputs for T tokens, full of rubbish.
struct Laid {
  std::vector<int32_t> per_rank, per_expert, physical;
  std::vector<uint8_t> in_rank;
  twRoutingLayout_t wanted = TW_ROUTING_LAYOUT_INIT;

  Laid(const World& world, int64_t tokens)
      : per_rank(world.size() + 1, -7),
        per_expert(world.config.num_experts + 1, -7),
        physical(tokens * world.config.top_k + 1, -7),
        in_rank(tokens * world.size() + 1, 77) {
    wanted.tokens_per_rank = tensor(per_rank.data(), twInt32, {world.size()});
    wanted.tokens_per_expert = tensor(per_expert.data(), twInt32, {world.config.num_experts});
    wanted.token_in_rank = tensor(in_rank.data(), twBool, {tokens, world.size()});
    wanted.physical_ids = tensor(physical.data(), twInt32, {tokens, world.config.top_k});
  }
};

bool untouched(const Laid& laid) {
  const auto all = [](const auto& values, int was) {
    return std::all_of(values.begin(), values.end(), [was](int value) { return value == was; });
  };
  return all(laid.per_rank, -7) && all(laid.per_expert, -7) && all(laid.physical, -7) && all(laid.in_rank, 77);
}

using Ints = std::vector<int32_t>;

// Five experts on three ranks: 0 and 1, 2 and 3, 4.
TEST(RoutingLayout, ByHand) {
  World world(3, make_config(5, 2, 4));
  Ints ids = {0, 1, -1, 4, -1, -1, 3, 1};
  const twTensor_t given = tensor(ids.data(), twInt32, {4, 2});
  Laid laid(world, 4);
  ASSERT_TW(twSuccess, twGroupRoutingLayout(world[1], 0, &given, &laid.wanted, nullptr));
  EXPECT_EQ(laid.per_rank, (Ints{2, 1, 1, -7}));
  EXPECT_EQ(laid.per_expert, (Ints{1, 2, 0, 1, 1, -7}));
  EXPECT_EQ(laid.in_rank, (std::vector<uint8_t>{1, 0, 0, 0, 0, 1, 0, 0, 0, 1, 1, 0, 77}));
  EXPECT_EQ(laid.physical, (Ints{0, 1, -1, 4, -1, -1, 3, 1, -7}));
}

TEST(RoutingLayout, EachOutputAlone) {
  World world(2, make_config(6, 3, 9));
  const Traffic traffic = make_traffic(world.config, {9, 7}, 3);
  Ints ids = traffic.ids[0];
  const twTensor_t given = tensor(ids.data(), twInt32, {9, 3});
  Laid all(world, 9);
  ASSERT_TW(twSuccess, twGroupRoutingLayout(world[0], 0, &given, &all.wanted, nullptr));
  for (int only = 0; only < 5; ++only) {  // the last one has none
    Laid one(world, 9);
    twTensor_t* const outputs[] = {&one.wanted.tokens_per_rank, &one.wanted.tokens_per_expert,
                                   &one.wanted.token_in_rank, &one.wanted.physical_ids};
    for (int i = 0; i < 4; ++i) {
      if (i != only) *outputs[i] = TW_TENSOR_INIT;
    }
    ASSERT_TW(twSuccess, twGroupRoutingLayout(world[0], 0, &given, &one.wanted, nullptr));
    EXPECT_EQ(one.per_rank, only == 0 ? all.per_rank : Ints(3, -7));
    EXPECT_EQ(one.per_expert, only == 1 ? all.per_expert : Ints(7, -7));
    EXPECT_EQ(one.in_rank, only == 2 ? all.in_rank : std::vector<uint8_t>(19, 77));
    EXPECT_EQ(one.physical, only == 3 ? all.physical : Ints(28, -7));
  }
}

// Ids of 64 bits whose tokens lie backwards, every third column: what comes of them is as if they lay together.
TEST(RoutingLayout, IdsOfAnyStride) {
  World world(2, make_config(4, 2, 4));
  std::vector<int64_t> memory(3 * 4, 99);
  const int64_t ids[3][2] = {{3, 0}, {-1, 2}, {1, -1}};
  for (int t = 0; t < 3; ++t) {
    for (int k = 0; k < 2; ++k) memory[(2 - t) * 4 + 3 * k] = ids[t][k];
  }
  twTensor_t given = tensor(memory.data() + 2 * 4, twInt64, {3, 2});
  given.stride[0] = -4;
  given.stride[1] = 3;
  Laid laid(world, 3);
  ASSERT_TW(twSuccess, twGroupRoutingLayout(world[0], 0, &given, &laid.wanted, nullptr));
  EXPECT_EQ(laid.physical, (Ints{3, 0, -1, 2, 1, -1, -7}));
  EXPECT_EQ(laid.per_rank, (Ints{2, 2, -7}));
}

TEST(RoutingLayout, NoTokens) {
  World world(2, make_config(4, 2, 4));
  const twTensor_t given = tensor(nullptr, twInt32, {0, 2});
  Laid laid(world, 0);
  ASSERT_TW(twSuccess, twGroupRoutingLayout(world[0], 0, &given, &laid.wanted, nullptr));
  EXPECT_EQ(laid.per_rank, (Ints{0, 0, -7}));
  EXPECT_EQ(laid.per_expert, (Ints{0, 0, 0, 0, -7}));
  EXPECT_EQ(laid.in_rank, (std::vector<uint8_t>{77}));
}

// What it tells is what the exchange of counts brings, whatever else is under way.
TEST(RoutingLayout, IsWhatIsSent) {
  World world(3, counting(7, 3, 9));
  const std::vector<int> tokens = {9, 0, 5};
  const Traffic traffic = make_traffic(world.config, tokens, 4);
  Counted counted(world, tokens, 4);
  counted.send();
  std::vector<Laid> laid;
  for (int rank = 0; rank < 3; ++rank) {
    Ints ids = traffic.ids[rank];
    const twTensor_t given = tensor(ids.data(), twInt32, {tokens[rank], 3});
    laid.emplace_back(world, tokens[rank]);
    ASSERT_TW(twSuccess, twGroupRoutingLayout(world[rank], 0, &given, &laid.back().wanted, nullptr));
  }
  counted.complete();
  Ints by_expert;
  for (int rank = 0; rank < 3; ++rank) {
    Ints from(3), mine(world.homes.held[rank]);
    EXPECT_TW(twSuccess, twHandleNumRecvTokens(counted.handles[rank], from.data(), nullptr));
    for (int source = 0; source < 3; ++source) EXPECT_EQ(laid[source].per_rank[rank], from[source]);
    EXPECT_TW(twSuccess, twHandleNumExpertRows(counted.handles[rank], mine.data()));
    by_expert.insert(by_expert.end(), mine.begin(), mine.end());
  }
  for (int expert = 0; expert < 7; ++expert) {
    EXPECT_EQ(laid[0].per_expert[expert] + laid[1].per_expert[expert] + laid[2].per_expert[expert], by_expert[expert]);
  }
  counted.use(twFlat);
}

// Expert 0 is in slots 0, 3 and 5, which serve it in turn.
TEST(RoutingLayout, PhysicalExperts) {
  const Ints slots = {0, 1, 2, 0, 3, 0};
  twPlacement_t placement = TW_PLACEMENT_INIT;
  placement.num_slots = 6;
  placement.slot_expert = slots.data();
  twGroupConfig_t config = make_config(4, 2, 4);
  config.placement = &placement;
  World world(2, config);
  Ints ids = {0, 3, 1, 0, 0, -1};
  const twTensor_t given = tensor(ids.data(), twInt32, {3, 2});
  Ints per_rank(2), per_expert(6), physical(6);
  twRoutingLayout_t wanted = TW_ROUTING_LAYOUT_INIT;
  wanted.tokens_per_rank = tensor(per_rank.data(), twInt32, {2});
  wanted.tokens_per_expert = tensor(per_expert.data(), twInt32, {6});
  wanted.physical_ids = tensor(physical.data(), twInt32, {3, 2});
  ASSERT_TW(twSuccess, twGroupRoutingLayout(world[1], 0, &given, &wanted, nullptr));
  EXPECT_EQ(physical, (Ints{3, 4, 1, 5, 0, -1}));
  EXPECT_EQ(per_expert, (Ints{1, 1, 0, 1, 1, 1}));
  EXPECT_EQ(per_rank, (Ints{2, 2}));
}

// An older program's struct has fewer outputs; a newer one's may have others, which must be empty.
TEST(RoutingLayout, StructsOfAnotherAge) {
  World world(2, make_config(4, 2, 4));
  Ints ids = {0, 3};
  const twTensor_t given = tensor(ids.data(), twInt32, {1, 2});
  Laid older(world, 1);
  older.wanted.size = offsetof(twRoutingLayout_t, token_in_rank);
  ASSERT_TW(twSuccess, twGroupRoutingLayout(world[0], 0, &given, &older.wanted, nullptr));
  EXPECT_EQ(older.per_expert, (Ints{1, 0, 0, 1, -7}));
  EXPECT_EQ(older.physical, Ints(3, -7));
  struct {
    twRoutingLayout_t known = TW_ROUTING_LAYOUT_INIT;
    uint64_t more = 0;
  } newer;
  newer.known.size = sizeof newer;
  EXPECT_TW(twSuccess, twGroupRoutingLayout(world[0], 0, &given, &newer.known, nullptr));
  newer.more = 1;
  EXPECT_TW(twInvalidArgument, twGroupRoutingLayout(world[0], 0, &given, &newer.known, nullptr));
}

TEST(RoutingLayout, Refusals) {
  World world(2, make_config(4, 2, 4));
  Ints ids = {0, 3, 1, -1};
  const twTensor_t good = tensor(ids.data(), twInt32, {2, 2});
  const auto refuses = [&](const char* what, const std::function<void(twTensor_t*, Laid*)>& spoil) {
    SCOPED_TRACE(what);
    twTensor_t given = good;
    Laid laid(world, 2);
    spoil(&given, &laid);
    EXPECT_TW(twInvalidArgument, twGroupRoutingLayout(world[0], 0, &given, &laid.wanted, nullptr));
    EXPECT_TRUE(says(what));
    EXPECT_TRUE(untouched(laid));
  };
  refuses("layout.tokens_per_rank has shape [3]; it must be [2]",
          [](twTensor_t*, Laid* laid) { laid->wanted.tokens_per_rank.shape[0] = 3; });
  refuses("layout.tokens_per_expert has dtype int64 (7); it must be int32",
          [](twTensor_t*, Laid* laid) { laid->wanted.tokens_per_expert.dtype = twInt64; });
  refuses("layout.token_in_rank has dtype uint8 (1); it must be bool",
          [](twTensor_t*, Laid* laid) { laid->wanted.token_in_rank.dtype = twUint8; });
  refuses("layout.physical_ids has shape [1, 2]; it must be [2, 2]",
          [](twTensor_t*, Laid* laid) { laid->wanted.physical_ids.shape[0] = 1; });
  refuses("layout.physical_ids has stride 3 in dimension 0",
          [](twTensor_t*, Laid* laid) { laid->wanted.physical_ids.stride[0] = 3; });
  refuses("overlap", [](twTensor_t*, Laid* laid) { laid->wanted.tokens_per_rank.data = laid->per_expert.data() + 2; });
  // Ids in the memory of an output are refused too, though the host would have read them before it writes.
  Laid laid(world, 2);
  std::copy(ids.begin(), ids.end(), laid.physical.begin());
  const twTensor_t inside = tensor(laid.physical.data(), twInt32, {2, 2});
  EXPECT_TW(twInvalidArgument, twGroupRoutingLayout(world[0], 0, &inside, &laid.wanted, nullptr));
  EXPECT_TRUE(says("overlap"));
  EXPECT_TRUE(std::equal(ids.begin(), ids.end(), laid.physical.begin()));
}

// An id that is none is refused before anything is written.
TEST(RoutingLayout, BadIds) {
  World world(2, make_config(4, 2, 4));
  const struct {
    Ints ids;
    const char* what;
  } bad[] = {{{0, 1, 2, 4}, "ids[1, 1] is 4; it must be -1 (no expert) or from 0 to 3"},
             {{-2, 1, 2, 3}, "ids[0, 0] is -2"},
             {{0, 1, 3, 3}, "ids[1, 1] is 3, which the token has already"}};
  for (const auto& [values, what] : bad) {
    Ints ids = values;
    const twTensor_t given = tensor(ids.data(), twInt32, {2, 2});
    Laid laid(world, 2);
    EXPECT_TW(twInvalidArgument, twGroupRoutingLayout(world[0], 0, &given, &laid.wanted, nullptr));
    EXPECT_TRUE(says(what));
    EXPECT_TRUE(untouched(laid));
  }
  EXPECT_EQ(error_of(world[0]).result, twSuccess) << "a record is of a step";
  const twTensor_t good = tensor(nullptr, twInt32, {0, 2});
  Laid laid(world, 0);
  EXPECT_TW(twInvalidArgument, twGroupRoutingLayout(world[0], 0, nullptr, &laid.wanted, nullptr));
  EXPECT_TRUE(says("ids is NULL"));
  EXPECT_TW(twInvalidArgument, twGroupRoutingLayout(world[0], 0, &good, nullptr, nullptr));
  EXPECT_TRUE(says("layout is NULL"));
  EXPECT_TW(twInvalidArgument, twGroupRoutingLayout(world[0], -1, &good, &laid.wanted, nullptr));
  EXPECT_TRUE(says("layer is -1; it must be from 0 to 0"));
  EXPECT_TW(twInvalidArgument, twGroupRoutingLayout(world[0], 0, &good, &laid.wanted, &laid));
  EXPECT_TRUE(says("stream"));
}

}  // namespace
}  // namespace tw::test
