// The sockets that stand for a network with RDMA (links.h), between two ranks of this process and with a CUDA that
// stands for one (fake_cuda.cc): what is put lies there before what is added, all of it is counted, and where nothing
// but that is wanted, large puts move nothing.
#include "links.h"

#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <cstdlib>
#include <memory>
#include <thread>
#include <vector>

#include "counts.h"
#include "rma_interface.h"

namespace tw::gin {
namespace {

constexpr int kRanks = 2;
constexpr uint64_t kBytes = 4 * kMoved;
using Counts = std::array<uint64_t, kPostKinds>;

class LinksTest : public testing::Test {
 protected:
  void connect(bool counts_only) {
    ::setenv("TOKENWAY_GIN_COUNT_ONLY", counts_only ? "1" : "0", 1);
    std::vector<std::array<char, kHandleBytes>> handles(kRanks);
    std::vector<void*> all;
    std::vector<int> listening;
    for (auto& handle : handles) {
      listening.push_back(Links::listen(handle.data()));
      all.push_back(handle.data());
    }
    std::vector<std::thread> threads;
    for (int rank = 0; rank < kRanks; ++rank) {
      links_.push_back(std::make_unique<Links>(rank, kRanks));
      bytes_.emplace_back(kBytes, std::byte(rank + 1));
      threads.emplace_back([&, rank] { EXPECT_TRUE(links_[rank]->connect(all.data(), listening[rank])); });
    }
    for (std::thread& thread : threads) thread.join();
    for (int rank = 0; rank < kRanks; ++rank) {
      memories_.push_back(links_[rank]->add_memory(bytes_[rank].data(), kBytes, kPointsToHost));
    }
    take();
  }

  // Puts the first bytes of rank 0's memory at the end of rank 1's, and adds to its first word; 0: nothing is put.
  std::shared_ptr<Request> post(uint64_t size, uint64_t add) {
    Operation operation;
    operation.from = size > 0 ? memories_[0] : nullptr;
    operation.size = size;
    operation.to_offset = kBytes - size;
    operation.signals = add > 0;
    operation.add = add;
    return links_[0]->post(1, {this, 0}, std::move(operation));
  }
  static void await(const std::shared_ptr<Request>& request) {
    while (request->state == Request::kWaiting) std::this_thread::sleep_for(std::chrono::microseconds(100));
    EXPECT_EQ(request->state, Request::kDone);
  }
  uint64_t word() const {
    const auto* const at = reinterpret_cast<const volatile uint64_t*>(bytes_[1].data());
    return *at;
  }
  void await_word(uint64_t wanted) const {
    while (word() != wanted) std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
  // Of rank 0 to rank 1.
  static Counts take() {
    std::array<uint64_t, kRanks * kRanks * kPostKinds> found{};
    post_counts().take(kRanks, found.data());
    Counts counts;
    for (int kind = 0; kind < kPostKinds; ++kind) counts[kind] = found[kPostKinds + kind];
    for (int kind = 0; kind < kPostKinds; ++kind) found[kPostKinds + kind] = 0;
    for (const uint64_t other : found) EXPECT_EQ(other, 0u);
    return counts;
  }

  std::vector<std::unique_ptr<Links>> links_;
  std::vector<std::vector<std::byte>> bytes_;
  std::vector<Memory*> memories_;
};

constexpr uint64_t kAll = 0x0202020202020202;  // in each word of rank 1's memory at first

TEST_F(LinksTest, CountsWhatItMoves) {
  connect(false);
  await(post(kMoved + 1, 0));
  EXPECT_EQ(take(), (Counts{1, kMoved + 1, 0, 1}));
  await(post(8, 0));
  await(post(0, 5));
  await(post(16, 1));
  await_word(kAll + 6);
  EXPECT_EQ(take(), (Counts{2, 24, 2, 0}));
  EXPECT_EQ(bytes_[1][kBytes - kMoved - 1], std::byte(1));
  EXPECT_EQ(bytes_[1][kBytes - kMoved - 2], std::byte(2));
  EXPECT_EQ(take(), Counts{});
}

TEST_F(LinksTest, CountsAlone) {
  connect(true);
  const auto large = post(kMoved + 1, 0);
  EXPECT_EQ(large->state, Request::kDone);  // at once
  await(post(kMoved, 0));
  await(post(2 * kMoved, 7));
  await_word(kAll + 7);
  EXPECT_EQ(take(), (Counts{3, 4 * kMoved + 1, 1, 0}));
  EXPECT_EQ(bytes_[1][kBytes - kMoved], std::byte(1));
  EXPECT_EQ(bytes_[1][kBytes - kMoved - 1], std::byte(2));
}

TEST_F(LinksTest, CountsNothingForWhoIsGone) {
  connect(true);
  links_[1].reset();
  for (;;) {  // until that is known
    const auto request = post(8, 1);
    while (request->state == Request::kWaiting) std::this_thread::sleep_for(std::chrono::microseconds(100));
    if (request->state == Request::kFailed) break;
  }
  take();
  EXPECT_EQ(post(kMoved + 1, 0)->state, Request::kFailed);
  EXPECT_EQ(take(), Counts{});
}

}  // namespace
}  // namespace tw::gin
