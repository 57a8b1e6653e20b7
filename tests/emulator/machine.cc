#include "machine.h"

#include <immintrin.h>
#include <sched.h>
#include <sys/mman.h>

#include <atomic>
#include <boost/context/continuation.hpp>
#include <boost/context/stack_context.hpp>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <new>
#include <random>
#include <thread>
#include <vector>

namespace tw::emulator {
namespace {

namespace context = boost::context;

constexpr int kWarp = 32;
constexpr std::chrono::seconds kLongest{60};  // longer than the waits of any test
constexpr size_t kStack = 64 * 1024;

// Keeps stacks to be used again, because a kernel has hundreds of fibers. Stacks have no guard pages: these would be
// two mappings each, and a process may have 65530 in all. A word at the far end tells of a stack that was too small.
class Stacks {
 public:
  context::stack_context allocate() {
    const std::lock_guard lock(mutex_);
    if (free_.empty()) grow();
    const context::stack_context stack = free_.back();
    free_.pop_back();
    return stack;
  }
  void deallocate(context::stack_context& stack) {
    if (*far_end(stack) != kUntouched) {
      std::fprintf(stderr, "emulated kernel: a thread used more than %zu bytes of stack\n", kStack);
      std::abort();
    }
    const std::lock_guard lock(mutex_);
    free_.push_back(stack);
  }

 private:
  static constexpr uint64_t kUntouched = 0x756e746f75636865;
  static constexpr size_t kAtOnce = 512;

  static uint64_t* far_end(const context::stack_context& stack) {
    return reinterpret_cast<uint64_t*>(static_cast<std::byte*>(stack.sp) - stack.size);
  }
  void grow() {
    void* const made =
        mmap(nullptr, kAtOnce * kStack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (made == MAP_FAILED) throw std::bad_alloc();
    for (size_t i = 1; i <= kAtOnce; ++i) {
      context::stack_context stack;
      stack.size = kStack;
      stack.sp = static_cast<std::byte*>(made) + i * kStack;
      *far_end(stack) = kUntouched;
      free_.push_back(stack);
    }
  }

  std::mutex mutex_;
  std::vector<context::stack_context> free_;
};
// Never destroyed: kernels may run when the process ends.
Stacks& stacks() {
  static auto* const all = new Stacks;
  return *all;
}
struct Pooled {
  context::stack_context allocate() { return stacks().allocate(); }
  void deallocate(context::stack_context& stack) { stacks().deallocate(stack); }
};

enum class State { kRuns, kPolls, kInCollective, kInBarrier, kInAccess, kOver };
enum class Access { kTogether, kLoad, kStore };
constexpr const char* kCollectives[] = {"__syncwarp", "a ballot", "a shuffle", "__match_any_sync", "__reduce_max_sync"};

constexpr const char* kStates[] = {"running", "waiting for memory", "in ", "in a barrier", "in an access", "over"};

struct Fiber {
  context::continuation body;
  uint3 thread{};
  State state = State::kRuns;
  // In a collective.
  Collective kind{};
  uint32_t mask = 0;
  uint32_t argument = 0;
  uint64_t value = 0;  // in, and out
  // In a barrier.
  bool vote = false;
  // In an access.
  Access access{};
  void* at = nullptr;
  Pair pair{};
};

class Block {
 public:
  Block(const Place& place, const std::function<void()>& kernel, const char* name)
      : place_(place), kernel_(kernel), name_(name), count_(static_cast<int>(place.threads.x)), fibers_(count_) {}

  void run();

  const Place& where() const { return place_; }
  void yield(State state) {
    running_->state = state;
    leave();
  }
  uint64_t collect(Collective kind, uint32_t mask, uint64_t value, uint32_t argument);
  Votes meet(bool vote);
  Fiber& access(Access access, void* at, Pair pair);
  bool lucky(uint32_t one_in) { return random_() % one_in == 0; }

 private:
  void jump(context::continuation& from, context::continuation& to);
  void enter(Fiber& fiber);
  context::continuation& next();
  void leave();
  bool turn(int warp);
  void serve_accesses(int warp);
  void finish(Fiber* warp, uint32_t mask);
  [[noreturn]] void fail(const char* what, const Fiber& fiber) const;

  Place place_;
  const std::function<void()>& kernel_;
  const char* name_;
  int count_;
  std::vector<Fiber> fibers_;
  Fiber* running_ = nullptr;
  context::continuation scheduler_;
  context::continuation* left_ = nullptr;  // where the continuation of who jumped last belongs
  int in_barrier_ = 0;
  int over_ = 0;
  Votes votes_{};
  std::minstd_rand random_;
};

thread_local Block* t_block = nullptr;
alignas(16) thread_local std::byte t_shared[kSharedBytes];

// Not inlined: what a fiber reads of its thread's storage changes while it waits.
[[gnu::noinline]] Block& block() { return *t_block; }

uint32_t seed() {
  static const uint32_t chosen = [] {
    const char* const text = std::getenv("TOKENWAY_EMULATOR_SEED");
    return text == nullptr ? 1u : static_cast<uint32_t>(std::strtoul(text, nullptr, 10));
  }();
  static std::atomic<uint32_t> next{0};
  return chosen * 7919 + next++;
}

void Block::fail(const char* what, const Fiber& fiber) const {
  std::fprintf(stderr, "emulated kernel %s, block %u, thread %u: %s\n", name_, place_.block.x, fiber.thread.x, what);
  const auto differ = [](const Fiber& a, const Fiber& b) {
    return a.state != b.state || (a.state == State::kInCollective && (a.kind != b.kind || a.mask != b.mask));
  };
  // Threads of a warp in the same state follow each other.
  for (int i = 0, begin = 0; i < count_; ++i) {
    const bool ends = i + 1 == count_ || (i + 1) % kWarp == 0 || differ(fibers_[i], fibers_[i + 1]);
    if (!ends) continue;
    const Fiber& other = fibers_[i];
    const bool meets = other.state == State::kInCollective;
    std::fprintf(stderr, "  threads %d to %d: %s%s, mask %08x\n", begin, i, kStates[static_cast<int>(other.state)],
                 meets ? kCollectives[static_cast<int>(other.kind)] : "", meets ? other.mask : 0);
    begin = i + 1;
  }
  std::abort();
}

// Returns when somebody jumps back.
void Block::jump(context::continuation& from, context::continuation& to) {
  left_ = &from;
  context::continuation came = to.resume();
  *left_ = std::move(came);
}

void Block::enter(Fiber& fiber) {
  running_ = &fiber;
  place_.thread = fiber.thread;
}

// Gives who goes on after the running fiber: the next of its warp that can, else the scheduler. The jump leads straight
// to that fiber, because the way through the scheduler would be two jumps, and jumps are most of what a kernel costs
// here.
context::continuation& Block::next() {
  const int lane = static_cast<int>(running_->thread.x % kWarp);
  Fiber* const warp = running_ - lane;
  const int size = std::min<int>(kWarp, count_ - static_cast<int>(warp - fibers_.data()));
  for (int i = 1; i < size; ++i) {
    Fiber& fiber = warp[lane + i < size ? lane + i : lane + i - size];
    if (fiber.state != State::kRuns) continue;
    enter(fiber);
    return fiber.body;
  }
  return scheduler_;
}

// Leaves the running fiber, whose state is no longer kRuns, until it is kRuns again.
void Block::leave() {
  Fiber& me = *running_;
  jump(me.body, next());
}

// Lets the fibers of a warp go on until all wait. Returns whether any went on.
bool Block::turn(int warp) {
  Fiber* const fibers = &fibers_[warp * kWarp];
  const int size = std::min(kWarp, count_ - warp * kWarp);
  const int first = static_cast<int>(random_() % static_cast<uint32_t>(size));
  for (int i = 0; i < size; ++i) {
    if (fibers[i].state == State::kPolls) fibers[i].state = State::kRuns;
  }
  bool went = false;
  for (int i = 0; i < size && !went; ++i) {
    Fiber& fiber = fibers[(first + i) % size];
    if (fiber.state != State::kRuns) continue;
    went = true;
    enter(fiber);
    jump(scheduler_, fiber.body);
  }
  for (int i = 0; i < size; ++i) {
    if (fibers[i].state != State::kInAccess) continue;
    serve_accesses(warp);
    return true;
  }
  return went;
}

// A flag is loaded before its data and stored behind them, as if all had been at once.
void Block::serve_accesses(int warp) {
  Fiber* const fibers = &fibers_[warp * kWarp];
  const int size = std::min(kWarp, count_ - warp * kWarp);
  uint32_t active = 0;
  for (int i = 0; i < size; ++i) {
    if (fibers[i].state == State::kInAccess && fibers[i].access == Access::kTogether) active |= 1u << i;
  }
  for (int i = 0; i < size; ++i) {
    Fiber& up = fibers[i];
    Fiber& down = fibers[size - 1 - i];
    if (up.state == State::kInAccess && up.access == Access::kStore) {
      _mm_store_si128(static_cast<__m128i*>(up.at),
                      _mm_set_epi64x(static_cast<int64_t>(up.pair.b), static_cast<int64_t>(up.pair.a)));
      std::atomic_signal_fence(std::memory_order_seq_cst);
    }
    if (down.state == State::kInAccess && down.access == Access::kLoad) {
      const __m128i value = _mm_load_si128(static_cast<const __m128i*>(down.at));
      std::memcpy(&down.pair, &value, sizeof value);
      std::atomic_signal_fence(std::memory_order_seq_cst);
    }
  }
  for (int i = 0; i < size; ++i) {
    if (fibers[i].state != State::kInAccess) continue;
    if (fibers[i].access == Access::kTogether) fibers[i].value = active;
    fibers[i].state = State::kRuns;
  }
}

uint64_t Block::collect(Collective kind, uint32_t mask, uint64_t value, uint32_t argument) {
  Fiber& fiber = *running_;
  const int lane = static_cast<int>(fiber.thread.x % kWarp);
  Fiber* const warp = &fiber - lane;
  const int size = std::min<int>(kWarp, count_ - static_cast<int>(warp - fibers_.data()));
  fiber.kind = kind;
  fiber.mask = size == kWarp ? mask : mask & ((1u << size) - 1);
  fiber.value = value;
  fiber.argument = argument;
  if ((mask >> lane & 1) == 0) fail("a collective whose mask leaves the thread out", fiber);
  fiber.state = State::kInCollective;
  // The loop ends at the first thread that is yet to come, which mostly is the next one; only the last to come looks at
  // all.
  bool all = true;
  for (int n = 1; n < size && all; ++n) {
    const int i = lane + n < size ? lane + n : lane + n - size;
    const Fiber& other = warp[i];
    if ((mask >> i & 1) == 0) continue;
    if (other.state == State::kOver) fail("a collective with a thread that has ended", fiber);
    if (other.state == State::kInCollective && other.kind == kind && other.mask == fiber.mask) continue;
    all = false;
    // A collective of other threads of the warp ends without this thread; two that wait for each other do not end.
    if (other.state == State::kInCollective && (other.mask >> lane & 1) != 0) {
      fail("threads of a warp meet in different collectives", fiber);
    }
  }
  if (all) {
    finish(warp, fiber.mask);
  } else {
    leave();
  }
  return fiber.value;
}

// Gives each thread of a collective its result and lets all go on.
void Block::finish(Fiber* warp, uint32_t mask) {
  uint64_t given[kWarp] = {};
  uint32_t ballot = 0;
  uint64_t most = 0;
  for (int i = 0; i < kWarp; ++i) {
    if ((mask >> i & 1) == 0) continue;
    given[i] = warp[i].value;
    ballot |= (given[i] != 0 ? 1u : 0u) << i;
    most = std::max(most, given[i]);
  }
  for (int i = 0; i < kWarp; ++i) {
    if ((mask >> i & 1) == 0) continue;
    Fiber& fiber = warp[i];
    fiber.state = State::kRuns;
    switch (fiber.kind) {
      case Collective::kMeet:
        break;
      case Collective::kBallot:
        fiber.value = ballot;
        break;
      case Collective::kMax:
        fiber.value = most;
        break;
      case Collective::kShuffle: {
        const uint32_t from = fiber.argument % kWarp;
        if ((mask >> from & 1) == 0) fail("a shuffle from a thread that its mask leaves out", fiber);
        fiber.value = given[from];
        break;
      }
      case Collective::kMatch: {
        uint32_t same = 0;
        for (int k = 0; k < kWarp; ++k) same |= (mask >> k & 1 && given[k] == given[i] ? 1u : 0u) << k;
        fiber.value = same;
        break;
      }
    }
  }
}

Votes Block::meet(bool vote) {
  Fiber& fiber = *running_;
  fiber.vote = vote;
  ++in_barrier_;
  yield(State::kInBarrier);
  return votes_;
}

Fiber& Block::access(Access access, void* at, Pair pair) {
  Fiber& fiber = *running_;
  fiber.access = access;
  fiber.at = at;
  fiber.pair = pair;
  if (reinterpret_cast<uintptr_t>(at) % 16 != 0) fail("16 bytes at an address that is no multiple of 16", fiber);
  yield(State::kInAccess);
  return fiber;
}

void Block::run() {
  t_block = this;
  random_.seed(seed());
  std::memset(t_shared, 0xcd, sizeof t_shared);
  for (int i = 0; i < count_; ++i) {
    Fiber& fiber = fibers_[i];
    fiber.thread = {static_cast<unsigned>(i), 0, 0};
    fiber.body = context::callcc(std::allocator_arg, Pooled{}, [this, &fiber](context::continuation&& back) {
      context::continuation came = back.resume();  // it exists; the first turn comes
      *left_ = std::move(came);
      kernel_();
      fiber.state = State::kOver;
      ++over_;
      left_ = &fiber.body;
      return std::move(next());
    });
  }
  const int warps = (count_ + kWarp - 1) / kWarp;
  const auto begun = std::chrono::steady_clock::now();
  uint32_t turns = 0;
  while (over_ < count_) {
    bool went = false;
    const int first = static_cast<int>(random_() % static_cast<uint32_t>(warps));
    for (int i = 0; i < warps; ++i) went |= turn((first + i) % warps);
    if (in_barrier_ > 0 && in_barrier_ + over_ == count_) {
      votes_ = {false, true};
      for (Fiber& fiber : fibers_) {
        if (fiber.state != State::kInBarrier) continue;
        votes_.any |= fiber.vote;
        votes_.all &= fiber.vote;
        fiber.state = State::kRuns;
      }
      in_barrier_ = 0;
      went = true;
    }
    if (!went && over_ < count_) {
      for (const Fiber& fiber : fibers_) {
        if (fiber.state != State::kOver) fail("nobody can go on", fiber);
      }
    }
    sched_yield();
    if (++turns % 65536 == 0 && std::chrono::steady_clock::now() - begun > kLongest) {
      fail("the block has not ended in a minute", fibers_[0]);
    }
  }
  t_block = nullptr;
}

}  // namespace

const Place& place() { return block().where(); }
void* shared_bytes() { return t_shared; }
void poll() { block().yield(State::kPolls); }
void maybe_poll() {
  if (block().lucky(16)) poll();
}
uint64_t collect(Collective kind, uint32_t mask, uint64_t value, uint32_t argument) {
  return block().collect(kind, mask, value, argument);
}
Votes meet_block(bool vote) { return block().meet(vote); }
uint32_t together() { return static_cast<uint32_t>(block().access(Access::kTogether, nullptr, {}).value); }
Pair load_together(const void* from) { return block().access(Access::kLoad, const_cast<void*>(from), {}).pair; }
void store_together(void* to, Pair value) { block().access(Access::kStore, to, value); }

void run_grid(dim3 blocks, dim3 threads, uint32_t shared, const std::function<void()>& kernel, const char* name,
              unsigned at_once) {
  if (threads.x * threads.y * threads.z != threads.x || threads.x > 1024 || shared > kSharedBytes) {
    std::fprintf(stderr, "emulated kernel %s: %u x %u x %u threads with %u bytes of shared memory\n", name, threads.x,
                 threads.y, threads.z, shared);
    std::abort();
  }
  const unsigned count = blocks.x * blocks.y * blocks.z;
  std::atomic<unsigned> next{0};
  const auto work = [&] {
    for (unsigned i = next++; i < count; i = next++) {
      Place place{{}, {i % blocks.x, i / blocks.x % blocks.y, i / blocks.x / blocks.y}, threads, blocks};
      std::make_unique<Block>(place, kernel, name)->run();
    }
  };
  std::vector<std::jthread> workers;
  for (unsigned i = 1; i < std::min(count, at_once); ++i) workers.emplace_back(work);
  work();
}

}  // namespace tw::emulator
