// Whether the network of devices over NCCL keeps what transport/network.h promises, on the GPUs that are here:
//
//   tokenway_gin_probe RANKS [ROUNDS]
//
// RANKS processes, on the devices by turns; each prints why it fails, and the first of them a line per check. Which
// NCCL and which plugin, and that several ranks share a GPU, is for the environment to say: tests/gin/run.sh.
//
//   late     a rank that tells its part, but never comes to NCCL, costs no more than the deadline
//   order    words come behind the bytes that they tell of: ROUNDS exchanges among all ranks, in two contexts at once
//   graph    the same by kernels of a graph that is replayed
//   growth   the same in memory that is added later, while what was captured before still goes
//   end      a network that is taken down in order can be made again
//   killed   where a peer is gone, abort() ends a kernel that posts to it, and the device goes on
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "bootstrap/bootstrap.h"
#include "core/backend.h"
#include "cuda/driver/driver.h"
#include "cuda/transport/net.cuh"
#include "cuda/transport/network.h"
#include "cuda/transport/window.h"

#if !TOKENWAY_WITH_GIN
#error "build it with TOKENWAY_GIN"
#endif

namespace {

using namespace tw;
using namespace tw::cuda;
using Clock = std::chrono::steady_clock;

constexpr int kContexts = 2;
constexpr int kProbeThreads = 256;
constexpr int kBanks = 2;
constexpr uint64_t kBlock = 256 << 10;          // bytes of a bank for each rank
constexpr uint64_t kPatience = 30'000'000'000;  // ns that a kernel waits for a word
constexpr std::chrono::seconds kMeeting{60};    // that ranks have to meet
constexpr std::chrono::seconds kLate{5};        // the deadline of the check of that name
constexpr uint64_t kFirst = uint64_t{7} << 32;  // what words hold before the first step

// What a memory consists of: banks of blocks by context and rank, then a word for each context and rank.
struct Places {
  int ranks;
  __host__ __device__ uint64_t block(int context, uint64_t step, int rank) const {
    return ((context * kBanks + step % kBanks) * ranks + rank) * kBlock;
  }
  __host__ __device__ uint64_t word(int context, int rank) const {
    return static_cast<uint64_t>(kContexts) * kBanks * ranks * kBlock + (context * ranks + rank) * sizeof(uint64_t);
  }
  uint64_t bytes() const { return word(kContexts, 0); }
};

struct Round {
  NetView net;
  Places places;
  int me;
  int out;  // numbers of memories
  int in;
  std::byte* out_memory;
  std::byte* in_memory;
  uint64_t* steps;  // [kContexts] steps that are done
  uint64_t* words;  // [kContexts] what all words hold
  uint32_t* wrong;
  uint32_t* late;
};

__device__ uint64_t now() {
  uint64_t time = 0;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(time));
  return time;
}

__device__ uint64_t load(const void* from) {
  uint64_t value = 0;
  asm volatile("ld.acquire.sys.u64 %0, [%1];" : "=l"(value) : "l"(from) : "memory");
  return value;
}

__host__ __device__ uint64_t mix(uint64_t value) {
  value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9;
  return value ^ value >> 27;
}

// Bytes of a block, which differ by step: a multiple of 8, the largest in every eighth step.
__host__ __device__ uint64_t size_of(uint64_t step) {
  return step % 8 == 0 ? kBlock : 8 + mix(step) % (kBlock / 16) / 8 * 8;
}

__device__ uint64_t element(int context, uint64_t step, int from, int to, uint64_t i) {
  return mix(mix(step * kContexts + context) + static_cast<uint64_t>(from) * 1000003 +
             static_cast<uint64_t>(to) * 7919 + i);
}

// A block for each context. A step fills a block for each peer, puts it in three pieces and adds to the peer's word
// behind it, waits for the words of all peers, and compares what has come. A bank is filled again two steps later: a
// peer's word of the step between says that it has compared the earlier one.
__global__ void exchange(Round round, int rounds) {
  const int context = blockIdx.x;
  const int ranks = round.places.ranks;
  uint64_t step = round.steps[context];
  uint64_t before = round.words[context];
  for (int i = 0; i < rounds; ++i) {
    ++step;
    const uint64_t bytes = size_of(step);
    const uint64_t word = (step << 32) + kFirst + bytes;
    for (int peer = 0; peer < ranks; ++peer) {
      auto* block = reinterpret_cast<uint64_t*>(round.out_memory + round.places.block(context, step, peer));
      for (uint64_t at = threadIdx.x; at < bytes / 8; at += blockDim.x) {
        block[at] = element(context, step, round.me, peer, at);
      }
    }
    __threadfence_system();
    __syncthreads();
    const int peer = threadIdx.x;
    if (peer < ranks && peer != round.me) {
      const NetPlace to{round.in, round.places.block(context, step, round.me)};
      const NetPlace from{round.out, round.places.block(context, step, peer)};
      const uint64_t cuts[] = {0, bytes / 24 * 8, bytes / 16 * 8, bytes};
      for (int piece = 0; piece < 3; ++piece) {
        const uint64_t begin = cuts[piece];
        if (cuts[piece + 1] == begin) continue;
        net_put(round.net, context, peer, {to.memory, to.offset + begin}, {from.memory, from.offset + begin},
                cuts[piece + 1] - begin);
      }
      net_add(round.net, context, peer, {round.in, round.places.word(context, round.me)}, word - before);
      const std::byte* const theirs = round.in_memory + round.places.word(context, peer);
      const uint64_t began = now();
      while (load(theirs) < word && now() - began < kPatience) {  // it may be a step ahead
      }
      if (load(theirs) < word) atomicAdd(round.late, 1);
    }
    if (__syncthreads_or(*static_cast<volatile uint32_t*>(round.late) != 0)) break;
    for (int from = 0; from < ranks; ++from) {
      const auto* block =
          reinterpret_cast<const volatile uint64_t*>(round.in_memory + round.places.block(context, step, from));
      for (uint64_t at = threadIdx.x; at < bytes / 8 && from != round.me; at += blockDim.x) {
        if (block[at] != element(context, step, from, round.me, at)) atomicAdd(round.wrong, 1);
      }
    }
    before = word;
    __syncthreads();
  }
  if (threadIdx.x == 0) {
    round.steps[context] = step;
    round.words[context] = before;
  }
}

// Posts to all peers, one of which is gone, more than any queue holds.
__global__ void flood(Round round, int puts) {
  const int peer = threadIdx.x;
  if (peer >= round.places.ranks || peer == round.me) return;
  for (int i = 0; i < puts; ++i) {
    net_put(round.net, 0, peer, {round.in, round.places.block(0, 0, round.me)},
            {round.out, round.places.block(0, 0, peer)}, 4096);
  }
}

__global__ void poke(uint32_t* word) { *word = 11; }

class Rank {
 public:
  Rank(int rank, int ranks, int rounds) : rank_(rank), ranks_(ranks), rounds_(rounds), members_(ranks) {
    std::iota(members_.begin(), members_.end(), 0);
  }

  int run(const std::string& address) {
    const Status begun = begin(address);
    if (!begun.ok()) return report("begin", begun);
    const auto check = [this](const char* name, Status (Rank::*what)()) {
      const Status mine = (this->*what)();
      return report(name, agree(*bootstrap_, members_, take_tags(), Clock::now() + kMeeting, name, mine));
    };
    int bad = check("late", &Rank::late) || check("order", &Rank::order) || check("graph", &Rank::graph) ||
              check("growth", &Rank::growth) || check("end", &Rank::end);
    if (bad == 0) bad = report("killed", killed());
    return bad;
  }

 private:
  int report(const char* name, const Status& status) {
    if (!status.ok()) std::printf("FAILED %s: rank %d: %s\n", name, rank_, status.text().c_str());
    if (status.ok() && rank_ == 0) std::printf("ok %s\n", name);
    std::fflush(stdout);
    return status.ok() ? 0 : 1;
  }

  uint64_t take_tags() { return tag_ += 4; }
  net::Meeting meeting(std::chrono::seconds time = kMeeting) {
    return {bootstrap_.get(), members_, take_tags(), Clock::now() + time};
  }

  Status begin(const std::string& address) {
    int devices = 0;
    TW_CUDA(cudaGetDeviceCount(&devices));
    init_.device = rank_ % devices;
    TW_CUDA(cudaSetDevice(init_.device));
    TW_CUDA(cudaFree(nullptr));
    TW_CUDA(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    TW_CUDA(cudaMalloc(&state_, sizeof *state_));
    TW_RETURN_IF_FAILED(find_driver(&driver_));
    return connect_mesh(rank_, ranks_, address, Clock::now() + kMeeting, &bootstrap_);
  }

  // The last rank does as if it came, in the form that gin.cc expects, and stays away from NCCL.
  Status late() {
    const net::Meeting meeting = this->meeting(kLate);
    if (rank_ == ranks_ - 1) {
      std::vector<Parcel> all;
      TW_RETURN_IF_FAILED(gather(*bootstrap_, members_, meeting.tag, {pack_result({}).add(ncclUniqueId{}).take(), {}},
                                 meeting.deadline, "staying away", &all));
      std::this_thread::sleep_until(meeting.deadline);
      return {};
    }
    std::unique_ptr<Network> none;
    const Status late = connect_network(init_, meeting, kContexts, &none);
    const auto over = Clock::now() - meeting.deadline;
    if (late.code != twTimeout) return fail(twSystemError, "connecting without a rank: \"{}\"", late.text());
    // Far more than it takes, and less than for ever: what NCCL does to end is no wait for the rank.
    if (over > kMeeting) return fail(twSystemError, "connecting without a rank ended late");
    return {};
  }

  Status add(std::shared_ptr<DeviceMapping>* memory, int* number) {
    const uint64_t bytes = Places{ranks_}.bytes();
    TW_RETURN_IF_FAILED(
        DeviceMapping::create(*driver_, init_.device, {init_.device}, bytes, {true, false, true}, memory));
    TW_RETURN_IF_FAILED(clear((*memory)->data(), bytes));
    const std::vector<uint64_t> words(static_cast<size_t>(kContexts) * ranks_, kFirst);
    TW_CUDA(cudaMemcpy((*memory)->data() + Places{ranks_}.word(0, 0), words.data(), words.size() * sizeof(uint64_t),
                       cudaMemcpyHostToDevice));
    return network_->add_memory(meeting(), (*memory)->data(), (*memory)->bytes(), number);
  }

  struct State {
    uint64_t steps[kContexts];
    uint64_t words[kContexts];
    uint32_t wrong;
    uint32_t late;
  };

  Round round(int out, int in) {
    return {network_->view(),
            {ranks_},
            rank_,
            out,
            in,
            memories_[out]->data(),
            memories_[in]->data(),
            state_->steps,
            state_->words,
            &state_->wrong,
            &state_->late};
  }

  // Begins to count steps: in memory whose words are as they were made.
  Status rewind() {
    State state{};
    for (uint64_t& word : state.words) word = kFirst;
    TW_CUDA(cudaMemcpy(state_, &state, sizeof state, cudaMemcpyHostToDevice));
    return {};
  }

  Status look(uint64_t steps) {
    TW_CUDA(cudaStreamSynchronize(stream_));
    State state{};
    TW_CUDA(cudaMemcpy(&state, state_, sizeof state, cudaMemcpyDeviceToHost));
    if (state.late != 0) {
      return fail(twTimeout, "{} words did not come in step {} or {} ({})", state.late, state.steps[0] + 1,
                  state.steps[1] + 1, network_->failure().text());
    }
    if (state.wrong != 0) return fail(twSystemError, "{} elements are wrong", state.wrong);
    for (const uint64_t done : state.steps) {
      if (done != steps) return fail(twSystemError, "{} steps are done, not {}", done, steps);
    }
    return network_->failure();
  }

  Status connect() {
    TW_RETURN_IF_FAILED(connect_network(init_, meeting(), kContexts, &network_));
    memories_.resize(2);
    for (int i = 0; i < 2; ++i) {
      int number = -1;
      TW_RETURN_IF_FAILED(add(&memories_[i], &number));
      if (number != i) return fail(twSystemError, "memory {} has the number {}", i, number);
    }
    return rewind();
  }

  Status order() {
    TW_RETURN_IF_FAILED(connect());
    exchange<<<kContexts, kProbeThreads, 0, stream_>>>(round(0, 1), rounds_);
    TW_CUDA(cudaGetLastError());
    return look(rounds_);
  }

  Status graph() {
    cudaGraph_t graph = nullptr;
    TW_CUDA(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal));
    exchange<<<kContexts, kProbeThreads, 0, stream_>>>(round(0, 1), 1);
    exchange<<<kContexts, kProbeThreads, 0, stream_>>>(round(0, 1), 2);
    TW_CUDA(cudaStreamEndCapture(stream_, &graph));
    TW_CUDA(cudaGraphInstantiate(&captured_, graph, 0));
    TW_CUDA(cudaGraphDestroy(graph));
    constexpr int kReplays = 10;
    for (int i = 0; i < kReplays; ++i) TW_CUDA(cudaGraphLaunch(captured_, stream_));
    return look(rounds_ + 3 * kReplays);
  }

  Status growth() {
    State before{};
    TW_CUDA(cudaMemcpy(&before, state_, sizeof before, cudaMemcpyDeviceToHost));
    memories_.resize(4);
    for (int i = 2; i < 4; ++i) {
      int number = -1;
      TW_RETURN_IF_FAILED(add(&memories_[i], &number));
      if (number != i) return fail(twSystemError, "memory {} has the number {}", i, number);
    }
    TW_RETURN_IF_FAILED(rewind());
    exchange<<<kContexts, kProbeThreads, 0, stream_>>>(round(2, 3), rounds_);
    TW_CUDA(cudaGetLastError());
    TW_RETURN_IF_FAILED(look(rounds_));
    TW_CUDA(cudaMemcpy(state_, &before, sizeof before, cudaMemcpyHostToDevice));
    TW_CUDA(cudaGraphLaunch(captured_, stream_));
    return look(before.steps[0] + 3);
  }

  Status end() {
    TW_CUDA(cudaGraphExecDestroy(captured_));
    network_.reset();
    memories_.clear();
    TW_RETURN_IF_FAILED(agree(*bootstrap_, members_, take_tags(), Clock::now() + kMeeting, "ending", {}));
    TW_RETURN_IF_FAILED(connect());
    exchange<<<kContexts, kProbeThreads, 0, stream_>>>(round(0, 1), 4);
    TW_CUDA(cudaGetLastError());
    return look(4);
  }

  // The last rank's process ends, without a word, while the others post to it.
  Status killed() {
    if (rank_ == ranks_ - 1) ::kill(::getpid(), SIGKILL);
    while (bootstrap_->alive(ranks_ - 1)) std::this_thread::sleep_for(std::chrono::milliseconds(10));
    constexpr int kPuts = 100'000;
    flood<<<1, kProbeThreads, 0, stream_>>>(round(0, 1), kPuts);
    TW_CUDA(cudaGetLastError());
    const auto until = Clock::now() + std::chrono::seconds(20);
    while (network_->failure().ok() && Clock::now() < until) std::this_thread::sleep_for(std::chrono::milliseconds(50));
    const Status told = network_->failure();
    std::thread([this] { network_->abort(); }).join();
    network_->abort();
    while (cudaStreamQuery(stream_) == cudaErrorNotReady) {
      if (Clock::now() > until + kMeeting) return fail(twTimeout, "a kernel that posts did not end behind abort()");
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    TW_CUDA(cudaStreamSynchronize(stream_));
    if (network_->failure().ok()) return fail(twSystemError, "the network has ended, and says that it has not");
    network_.reset();
    uint32_t word = 0;
    poke<<<1, 1, 0, stream_>>>(&state_->wrong);
    TW_CUDA(cudaStreamSynchronize(stream_));
    TW_CUDA(cudaMemcpy(&word, &state_->wrong, sizeof word, cudaMemcpyDeviceToHost));
    if (word != 11) return fail(twSystemError, "the device does not go on");
    if (told.ok()) return fail(twSystemError, "a peer is gone, and the network did not tell");
    return {};
  }

  const int rank_;
  const int ranks_;
  const int rounds_;
  std::vector<int> members_;
  uint64_t tag_ = 0;
  std::unique_ptr<Bootstrap> bootstrap_;
  BackendInit init_;
  const Driver* driver_ = nullptr;
  std::vector<std::shared_ptr<DeviceMapping>> memories_;
  std::unique_ptr<Network> network_;  // ends before its memories
  cudaStream_t stream_ = nullptr;
  cudaGraphExec_t captured_ = nullptr;
  State* state_ = nullptr;
};

}  // namespace

int main(int argc, char** argv) {
  const int ranks = argc > 1 ? std::atoi(argv[1]) : 2;
  const int rounds = argc > 2 ? std::atoi(argv[2]) : 200;
  if (ranks < 2 || ranks > kProbeThreads || rounds < 1) {
    std::fprintf(stderr, "usage: %s RANKS (2 to %d) [ROUNDS]\n", argv[0], kProbeThreads);
    return 2;
  }
  const std::string address = "gin-probe-" + std::to_string(::getpid());
  std::vector<pid_t> processes;
  for (int rank = 0; rank < ranks; ++rank) {
    const pid_t process = ::fork();
    if (process == 0) {
      ::alarm(540);  // nothing here takes as long
      std::_Exit(Rank(rank, ranks, rounds).run(address));
    }
    processes.push_back(process);
  }
  int bad = 0;
  for (int rank = 0; rank < ranks; ++rank) {
    int status = 0;
    ::waitpid(processes[rank], &status, 0);
    const bool killed = rank == ranks - 1 && WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL;
    if (status == 0 || killed) continue;
    ++bad;
    std::printf("FAILED rank %d: %s %d\n", rank, WIFSIGNALED(status) ? "signal" : "exit code",
                WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status));
  }
  std::printf("%s: %d of %d ranks failed\n", bad == 0 ? "PASSED" : "FAILED", bad, ranks);
  return bad == 0 ? 0 : 1;
}
