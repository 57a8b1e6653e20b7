// Partials between hosts stay in their messages, where sums read them: no copy is made, no other step takes them for
// its rows, and they outlive the rank in whose memory they lie.
#include <algorithm>

#include "core/group.h"
#include "hosts_world.h"

namespace tw::test {
namespace {

// Partials of other hosts' ranks are not copied to their places in the window: sums read them in their messages. Those
// of the host's own ranks are put there.
TEST(BetweenHosts, PartialsAreReadWhereTheyCame) {
  const twGroupConfig_t config = make_config(8, 3, 5, 24);
  World world(comms_on({2, 2}, std::make_shared<Nets>(7, 4)), config);
  const Traffic traffic = make_traffic(config, {5, 3, 4, 5}, 3);
  Exchange exchange(world, traffic, {twRankMajor}, 4);
  exchange.dispatch();
  const WindowMap& map = world[0]->context.map;
  const uint64_t row = map.shape().combine_bytes;
  const auto place = [&](int rank, int token, int position) {  // the second step's
    return world[rank]->backend->window() + map.inbox(0, 0, token, position);
  };
  constexpr std::byte kUntouched{0xee};
  for (int rank = 0; rank < 4; ++rank) {
    for (int token = 0; token < config.max_tokens; ++token) {
      for (int position = 0; position < config.top_k; ++position) {
        std::fill_n(place(rank, token, position), row, kUntouched);
      }
    }
  }
  exchange.combine();
  int apart = 0, near = 0;
  for (int rank = 0; rank < 4; ++rank) {
    for (int token = 0; token < traffic.tokens[rank]; ++token) {
      int position = 0;
      for (int from = 0; from < 4; ++from) {
        if (!goes(traffic, config, rank, token, from)) continue;
        const std::byte* const at = place(rank, token, position++);
        const bool untouched = std::all_of(at, at + row, [&](std::byte byte) { return byte == kUntouched; });
        if (from / 2 != rank / 2) {
          EXPECT_TRUE(untouched) << rank << " " << token << " " << from;
          ++apart;
        } else if (from != rank) {
          EXPECT_FALSE(untouched) << rank << " " << token << " " << from;
          ++near;
        }
      }
    }
  }
  EXPECT_GT(apart, 0);
  EXPECT_GT(near, 0);
}

// A dispatch in the bank of an earlier combine has its rows at their places.
TEST(BetweenHosts, DispatchesInTheBankOfACombine) {
  const twGroupConfig_t config = make_config(8, 3, 5, 24);
  World world(comms_on({2, 2}, std::make_shared<Nets>(5, 3)), config);
  Exchange exchange(world, make_traffic(config, {5, 4, 3, 5}, 6), {twRankMajor}, 6);
  exchange.dispatch();
  exchange.combine();
  for (uint32_t salt = 7; salt < 10; ++salt) {
    exchange.renew(salt);
    exchange.dispatch();
  }
}

// A rank that ends when it has its results leaves its mate those messages in its memory that the mate has yet to read.
TEST(BetweenHosts, MessagesOfAMateThatHasEnded) {
  for (const int ends : {0, 1}) {
    World world(comms_on({2, 2}, std::make_shared<Nets>(5, 3)), make_config(8, 3, 5, 24));
    const Traffic traffic = make_traffic(world.config, {5, 4, 3, 5}, 6);
    Exchange exchange(world, traffic, {twRankMajor}, 6);
    exchange.dispatch();
    exchange.send_combine();
    ASSERT_TW(twSuccess, exchange[ends].complete());  // so all that goes to this host has come
    world.kill(ends);
    ASSERT_TW(twSuccess, exchange[1 - ends].complete());
    exchange[1 - ends].expect_tokens();
    for (const int rank : {2, 3}) {
      ASSERT_TW(twSuccess, exchange[rank].complete());
      exchange[rank].expect_tokens();
    }
  }
}

}  // namespace
}  // namespace tw::test
