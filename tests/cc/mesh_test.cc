// The mesh between processes, here between threads: what is posted passes by meetings, and meetings end early where a
// member has left.
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <latch>
#include <thread>

#include "bootstrap/bootstrap.h"
#include "bootstrap/socket.h"
#include "harness.h"

namespace tw::test {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

constexpr auto kFarOff = 20s;  // nobody waits as long, unless something is wrong

struct MeshOf {
  explicit MeshOf(int size) : ranks(size) {
    static std::atomic<int> serial = 0;
    const std::string address = "mesh-test-" + std::to_string(::getpid()) + "-" + std::to_string(serial++);
    on_all_ranks(size, [&](int rank) {
      const Status connected = connect_mesh(rank, size, address, Clock::now() + kFarOff, &ranks[rank]);
      ASSERT_TRUE(connected.ok()) << connected.text();
    });
  }
  Bootstrap& operator[](int rank) { return *ranks[rank]; }
  std::vector<std::unique_ptr<Bootstrap>> ranks;
};

// A meeting of rank 0 with rank 1, which does not come; it waits until it is told that rank 1 has left.
class Waiting {
 public:
  explicit Waiting(MeshOf& mesh)
      : thread_([this, &mesh] {
          const std::vector<int> members{0, 1};
          std::vector<Parcel> all;
          presence = mesh[0].exchange(members, 7, {"mine", {}}, Clock::now() + kFarOff, &all, [this](int member) {
            EXPECT_EQ(member, 1);
            waits_.release_once();
            return left.load();
          });
          ended = true;
        }) {
    waits_.wait();
  }
  void join() { thread_.join(); }

  std::atomic<bool> left = false;
  std::atomic<bool> ended = false;
  std::vector<Presence> presence;

 private:
  struct Event {
    std::latch latch{1};
    std::atomic<bool> released = false;
    void release_once() {
      if (!released.exchange(true)) latch.count_down();
    }
    void wait() { latch.wait(); }
  } waits_;
  std::thread thread_;
};

std::string await_post(Bootstrap& mesh, int peer, uint64_t tag) {
  const auto until = Clock::now() + kFarOff / 2;
  std::string bytes;
  while (!mesh.posted(peer, tag, &bytes) && Clock::now() < until) std::this_thread::sleep_for(1ms);
  return bytes;
}

TEST(Mesh, PostsPassByAMeetingThatWaits) {
  MeshOf mesh(3);
  Waiting meeting(mesh);
  for (const int peer : {1, 2}) {  // who is met, and who is not
    mesh[0].post(peer, 3, "abort");
    EXPECT_EQ(await_post(mesh[peer], 0, 3), "abort") << "to rank " << peer;
    mesh[peer].post(0, 3, "heard");
    EXPECT_EQ(await_post(mesh[0], peer, 3), "heard") << "from rank " << peer;
  }
  EXPECT_FALSE(meeting.ended) << "the posts came only after the meeting";
  meeting.left = true;
  meeting.join();
  EXPECT_EQ(meeting.presence, (std::vector<Presence>{Presence::kHere, Presence::kGone}));
}

// The other thread's look for posts takes the parcel from the socket, where the meeting waits for it.
TEST(Mesh, AMeetingHearsWhatAnotherThreadHasRead) {
  MeshOf mesh(2);
  const std::vector<int> members{0, 1};
  std::atomic<bool> done = false;
  std::thread looks([&] {
    std::string bytes;
    while (!done) (void)mesh[0].posted(1, 3, &bytes);
  });
  constexpr size_t kMeetings = 50;
  std::vector<Clock::duration> took(kMeetings);
  on_all_ranks(2, [&](int rank) {
    for (size_t i = 0; i < kMeetings; ++i) {
      if (rank == 1) std::this_thread::sleep_for(2ms);  // rank 0 waits
      const std::string mine = std::to_string(i) + " of rank " + std::to_string(rank);
      const auto begin = Clock::now();
      std::vector<Parcel> all;
      const auto presence = mesh[rank].exchange(members, 10 + i, {mine, {}}, Clock::now() + kFarOff, &all);
      if (rank == 0) took[i] = Clock::now() - begin;
      EXPECT_EQ(presence, (std::vector<Presence>(2, Presence::kHere)));
      EXPECT_EQ(all[1 - rank].bytes, std::to_string(i) + " of rank " + std::to_string(1 - rank));
    }
  });
  done = true;
  looks.join();
  // Where nobody wakes it, it looks after a tenth of a second. It reads few parcels before the other thread.
  std::nth_element(took.begin(), took.begin() + kMeetings / 4, took.end());
  EXPECT_LT(took[kMeetings / 4], 95ms);
}

// A meeting of all fails with the first that is gone: nobody waits for one that is late, besides.
TEST(Mesh, NobodyWaitsForTheLateWhereOneIsGone) {
  MeshOf mesh(3);
  std::vector<std::unique_ptr<Bootstrap>> local = make_local_bootstraps(3);
  const std::vector<int> members{0, 1, 2};
  for (auto* ranks : {&mesh.ranks, &local}) {
    SCOPED_TRACE(ranks == &local ? "in one process" : "over sockets");
    (*ranks)[2].reset();
    std::vector<Parcel> all;
    const auto begin = Clock::now();
    const Status met = gather(*(*ranks)[0], members, 9, {"mine", {}}, begin + kFarOff, "creating a group", &all);
    EXPECT_LT(Clock::now(), begin + kFarOff);
    EXPECT_EQ(met.code, twPeerDied);
    EXPECT_EQ(met.text(), "creating a group: rank 2 is gone");
    // Who can do without goes on: the late one still comes.
    (*ranks)[1]->give(members, 10, "late");
    const auto presence = (*ranks)[0]->exchange(members, 10, {"mine", {}}, Clock::now() + kFarOff, &all);
    EXPECT_EQ(presence, (std::vector<Presence>{Presence::kHere, Presence::kHere, Presence::kGone}));
  }
}

// A rank may fail to connect when another is connected already, which hears of it in its first meeting: why, not only
// that it is gone.
TEST(Mesh, APeerThatCouldNotConnectAfterAllSaysWhy) {
  int ends[2];
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends), 0);
  std::vector<Link> links(2);
  links[1] = Link(Connection(Fd(ends[0])));
  const std::unique_ptr<Bootstrap> mesh = make_mesh(0, std::move(links), Fd(), true);
  {
    Link peer(Connection{Fd(ends[1])});
    peer.connection.queue(kNewsTag, pack_news({twSystemError, "rank 1: it has no descriptors"}));
    peer.connection.pump();
  }
  const std::vector<int> members{0, 1};
  std::vector<Parcel> all;
  const Status met = gather(*mesh, members, 9, {"mine", {}}, Clock::now() + kFarOff, "creating a group", &all);
  EXPECT_EQ(met.code, twSystemError);
  EXPECT_EQ(met.text(), "rank 1: it has no descriptors");
}

// What a rank gave before it left counts: others have it, and must come to the same end.
TEST(Mesh, WhatWasGivenBeforeLeavingCounts) {
  MeshOf mesh(2);
  std::vector<std::unique_ptr<Bootstrap>> local = make_local_bootstraps(2);
  for (const auto* both_at : {&mesh.ranks, &local}) {
    SCOPED_TRACE(both_at == &local ? "in one process" : "over sockets");
    const auto& both = *both_at;
    const std::vector<int> members{0, 1};
    std::vector<Parcel> all;
    bool given = false;
    const auto left = [&](int) {
      std::vector<Parcel> theirs;
      if (!given) (void)both[1]->exchange(members, 5, {"last words", {}}, Clock::now() + kFarOff, &theirs);
      given = true;
      return true;
    };
    const auto presence = both[0]->exchange(members, 5, {"mine", {}}, Clock::now() + kFarOff, &all, left);
    EXPECT_EQ(presence[1], Presence::kHere);
    EXPECT_EQ(all[1].bytes, "last words");
  }
}

}  // namespace
}  // namespace tw::test
