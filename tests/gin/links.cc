// Sockets and threads of links.h: for each rank a thread that sends what is posted to it, and one that takes what
// comes.
#include "links.h"

#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "counts.h"
#include "rma_interface.h"

namespace tw::gin {
namespace {

constexpr uint64_t kChunk = 1 << 20;              // bytes that are moved at a time
constexpr std::chrono::seconds kRegistering{30};  // that a peer may be ahead in adding memory

uint64_t number_of(const char* variable) {
  const char* const text = std::getenv(variable);
  return text == nullptr ? 0 : std::strtoull(text, nullptr, 10);
}

bool send_all(int fd, const void* data, uint64_t size) {
  const char* at = static_cast<const char*>(data);
  while (size > 0) {
    const ssize_t sent = ::send(fd, at, size, MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent <= 0) return false;
    at += sent;
    size -= static_cast<uint64_t>(sent);
  }
  return true;
}

bool receive_all(int fd, void* data, uint64_t size) {
  char* at = static_cast<char*>(data);
  while (size > 0) {
    const ssize_t come = ::recv(fd, at, size, 0);
    if (come < 0 && errno == EINTR) continue;
    if (come <= 0) return false;
    at += come;
    size -= static_cast<uint64_t>(come);
  }
  return true;
}

}  // namespace

// What comes in front of an operation's bytes.
struct Links::Header {
  Header() = default;
  explicit Header(const Operation& operation)
      : to(operation.to),
        word(operation.word),
        signals(operation.signals ? 1 : 0),
        to_offset(operation.to_offset),
        size(operation.size),
        word_offset(operation.word_offset),
        add(operation.add) {}
  uint32_t to = 0;
  uint32_t word = 0;
  uint64_t signals = 0;
  uint64_t to_offset = 0;
  uint64_t size = 0;
  uint64_t word_offset = 0;
  uint64_t add = 0;
};

// Memory of the host that the device reaches, and a stream, for one thread. It is made while ranks connect: memory that
// is pinned later may wait for a kernel, and that for what this thread is to bring.
struct Links::Stage {
  Stage() {
    cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
    cudaMallocHost(&bytes, kChunk);
  }
  // Makes it the calling thread's.
  void take(int device) {
    cudaSetDevice(device);
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;  // other threads may be capturing
    cudaThreadExchangeStreamCaptureMode(&mode);
  }
  ~Stage() {
    cudaStreamDestroy(stream);
    cudaFreeHost(bytes);
  }
  bool copy(void* to, const void* from, uint64_t size, int kind) {
    if (kind == kPointsToHost) {
      std::memcpy(to, from, size);
      return true;
    }
    return cudaMemcpyAsync(to, from, size, cudaMemcpyDefault, stream) == cudaSuccess &&
           cudaStreamSynchronize(stream) == cudaSuccess;
  }
  cudaStream_t stream = nullptr;
  std::byte* bytes = nullptr;
};

Links::Links(int rank, int ranks) : rank_(rank), ranks_(ranks) {
  for (int i = 0; i < ranks; ++i) peers_.push_back(std::make_unique<Peer>());
}

int Links::listen(void* handle) {
  const char* const where = std::getenv("TOKENWAY_GIN_ADDRESS");
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = ::inet_addr(where == nullptr ? "127.0.0.1" : where);
  socklen_t length = sizeof address;
  auto* const generic = reinterpret_cast<sockaddr*>(&address);
  const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0 || ::bind(fd, generic, length) != 0 || ::listen(fd, SOMAXCONN) != 0 ||
      ::getsockname(fd, generic, &length) != 0) {
    if (fd >= 0) ::close(fd);
    return -1;
  }
  std::memset(handle, 0, kHandleBytes);
  std::memcpy(handle, &address, sizeof address);
  return fd;
}

bool Links::connect(void* const handles[], int listening) {
  seed_ = number_of("TOKENWAY_GIN_SEED");
  delay_us_ = number_of("TOKENWAY_GIN_DELAY_US");
  counts_alone_ = counts_alone();
  if (cudaGetDevice(&device_) != cudaSuccess) return false;
  for (int other = 0; other < rank_; ++other) {
    sockaddr_in address{};
    std::memcpy(&address, handles[other], sizeof address);
    int& fd = peers_[other]->fd;
    fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0 || ::connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof address) != 0) return false;
    if (!send_all(fd, &rank_, sizeof rank_)) return false;
  }
  for (int i = rank_ + 1; i < ranks_; ++i) {
    const int fd = ::accept(listening, nullptr, nullptr);
    int who = -1;
    if (fd < 0 || !receive_all(fd, &who, sizeof who) || who <= rank_ || who >= ranks_) return false;
    peers_[who]->fd = fd;
  }
  for (int other = 0; other < ranks_; ++other) {
    Peer& peer = *peers_[other];
    const int yes = 1;
    peer.out = std::make_shared<Stage>();
    if (other != rank_) peer.in = std::make_shared<Stage>();
    if (other != rank_) ::setsockopt(peer.fd, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
    peer.sending = std::thread([this, other] { send(other); });
    if (other != rank_) peer.receiving = std::thread([this, other] { receive(other); });
  }
  return true;
}

Links::~Links() {
  stopping_ = true;
  {
    const std::lock_guard lock(memories_mutex_);
    memory_added_.notify_all();
  }
  for (const auto& peer : peers_) {
    const std::lock_guard lock(peer->mutex);
    if (peer->fd >= 0) ::shutdown(peer->fd, SHUT_RDWR);
    peer->more.notify_all();
  }
  for (const auto& peer : peers_) {
    if (peer->sending.joinable()) peer->sending.join();
    if (peer->receiving.joinable()) peer->receiving.join();
    if (peer->fd >= 0) ::close(peer->fd);
  }
}

Memory* Links::add_memory(void* data, uint64_t size, int kind) {
  const std::lock_guard lock(memories_mutex_);
  const auto number = static_cast<uint32_t>(memories_.size());
  memories_.push_back(std::make_unique<Memory>(Memory{static_cast<std::byte*>(data), size, kind, number}));
  memory_added_.notify_all();
  return memories_.back().get();
}

void Links::drop(Memory* memory) {
  const std::lock_guard lock(memories_mutex_);
  memory->dropped = true;
}

std::byte* Links::find(uint32_t number, uint64_t offset, uint64_t size, int* kind) {
  std::unique_lock lock(memories_mutex_);
  memory_added_.wait_for(lock, kRegistering, [&] { return number < memories_.size() || stopping_; });
  if (number >= memories_.size()) return nullptr;
  const Memory& memory = *memories_[number];
  if (memory.dropped || offset > memory.size || size > memory.size - offset) return nullptr;
  *kind = memory.kind;
  return memory.data + offset;
}

std::shared_ptr<Request> Links::post(int rank, const Lane& lane, Operation operation) {
  auto request = std::make_shared<Request>();
  operation.request = request;
  Peer& peer = *peers_[rank];
  const std::lock_guard lock(peer.mutex);
  if (peer.gone) {
    refuse(rank, *request);
    return request;
  }
  if (operation.size > 0) post_counts().put(rank_, rank, operation.size);
  if (operation.signals) post_counts().add(rank_, rank);
  if (counts_alone_ && operation.size > kMoved) operation.size = 0;
  if (operation.size == 0 && !operation.signals) {
    request->state = Request::kDone;
    return request;
  }
  peer.lanes[lane].push_back(std::move(operation));
  peer.more.notify_one();
  return request;
}

// Takes an operation that may go next: of any lane, any of the puts before its first word, or that word if it is first.
Operation Links::take(Peer& peer, std::unique_lock<std::mutex>& lock, std::mt19937_64& random) {
  std::vector<std::deque<Operation>*> ready;
  peer.more.wait(lock, [&] {
    ready.clear();
    for (auto& [lane, queue] : peer.lanes) {
      if (!queue.empty()) ready.push_back(&queue);
    }
    return !ready.empty() || stopping_ || peer.gone;
  });
  if (ready.empty()) return {};
  std::deque<Operation>& queue = *ready[random() % ready.size()];
  const auto word = std::find_if(queue.begin(), queue.end(), [](const Operation& each) { return each.signals; });
  const auto before = static_cast<uint64_t>(word - queue.begin());
  const auto taken = queue.begin() + static_cast<ptrdiff_t>(seed_ == 0 || before == 0 ? 0 : random() % before);
  Operation operation = std::move(*taken);
  queue.erase(taken);
  return operation;
}

void Links::send(int rank) {
  Peer& peer = *peers_[rank];
  Stage& stage = *peer.out;
  stage.take(device_);
  std::mt19937_64 random(seed_ + static_cast<uint64_t>(rank_) * ranks_ + rank);
  std::unique_lock lock(peer.mutex);
  while (!stopping_ && !peer.gone) {
    const Operation operation = take(peer, lock, random);
    if (operation.request == nullptr) continue;
    if (delay_us_ > 0) {
      const std::chrono::microseconds delay(random() % (delay_us_ + 1));
      peer.more.wait_for(lock, delay, [&] { return stopping_.load(); });
    }
    lock.unlock();
    const bool ok = rank == rank_ ? move_here(stage, operation) : move_out(stage, peer.fd, operation);
    if (ok) operation.request->state = Request::kDone;
    if (!ok) {
      refuse(rank, *operation.request);
      lose(rank);
    }
    lock.lock();
  }
}

void Links::receive(int rank) {
  Stage& stage = *peers_[rank]->in;
  stage.take(device_);
  Header header;
  while (!stopping_ && receive_all(peers_[rank]->fd, &header, sizeof header)) {
    if (move_in(stage, peers_[rank]->fd, header)) continue;
    failed_ = true;
    break;
  }
  lose(rank);
}

// Fails all that is under way to a rank, and what comes later. That a rank has ended is no failure by itself: a NIC
// would not learn of it either.
void Links::lose(int rank) {
  Peer& peer = *peers_[rank];
  const std::lock_guard lock(peer.mutex);
  peer.gone = true;
  for (auto& [lane, queue] : peer.lanes) {
    for (Operation& each : queue) refuse(rank, *each.request);
    queue.clear();
  }
  peer.more.notify_all();
}

void Links::refuse(int rank, Request& request) {
  request.state = Request::kFailed;
  if (failed_.exchange(true) || stopping_) return;
  std::fprintf(stderr, "tokenway_gin_plugin: rank %d cannot put to rank %d any more\n", rank_, rank);
}

bool Links::move_here(Stage& stage, const Operation& operation) {
  for (uint64_t done = 0; done < operation.size;) {
    const uint64_t size = std::min(kChunk, operation.size - done);
    int kind = 0;
    std::byte* const to = find(operation.to, operation.to_offset + done, size, &kind);
    const std::byte* const from = operation.from->data + operation.from_offset + done;
    if (to == nullptr || !stage.copy(stage.bytes, from, size, operation.from->kind)) return false;
    if (!stage.copy(to, stage.bytes, size, kind)) return false;
    done += size;
  }
  return !operation.signals || add(stage, operation.word, operation.word_offset, operation.add);
}

bool Links::move_out(Stage& stage, int fd, const Operation& operation) {
  const Header header(operation);
  if (!send_all(fd, &header, sizeof header)) return false;
  for (uint64_t done = 0; done < operation.size;) {
    const uint64_t size = std::min(kChunk, operation.size - done);
    const std::byte* const from = operation.from->data + operation.from_offset + done;
    if (!stage.copy(stage.bytes, from, size, operation.from->kind) || !send_all(fd, stage.bytes, size)) return false;
    done += size;
  }
  return true;
}

bool Links::move_in(Stage& stage, int fd, const Header& header) {
  for (uint64_t done = 0; done < header.size;) {
    const uint64_t size = std::min(kChunk, header.size - done);
    int kind = 0;
    std::byte* const to = find(header.to, header.to_offset + done, size, &kind);
    if (to == nullptr || !receive_all(fd, stage.bytes, size) || !stage.copy(to, stage.bytes, size, kind)) return false;
    done += size;
  }
  return header.signals == 0 || add(stage, header.word, header.word_offset, header.add);
}

// The device only reads the word meanwhile.
bool Links::add(Stage& stage, uint32_t number, uint64_t offset, uint64_t value) {
  int kind = 0;
  std::byte* const word = find(number, offset, sizeof value, &kind);
  const std::lock_guard lock(words_);
  if (word == nullptr || !stage.copy(stage.bytes, word, sizeof value, kind)) return false;
  uint64_t sum = 0;
  std::memcpy(&sum, stage.bytes, sizeof sum);
  sum += value;
  std::memcpy(stage.bytes, &sum, sizeof sum);
  return stage.copy(word, stage.bytes, sizeof sum, kind);
}

}  // namespace tw::gin
