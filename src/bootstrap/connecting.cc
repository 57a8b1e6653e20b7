// The steps of Connecting (bootstrap/connecting.h): dialling, accepting, greeting, hearing and telling, in one loop
// around poll. A handshake has four parts (hello, ready, over, news); their order and tags must be the same in all
// ranks of a comm, which the version in the hello checks. All ranks that dialled are heard before any is found dead:
// that decides which rank is blamed.
#include "bootstrap/connecting.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "bootstrap/descriptors.h"
#include "core/interrupt.h"

namespace tw {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

constexpr milliseconds kLook = kInterruptLook;
constexpr milliseconds kRetry{2};          // before the second attempt to dial; later ones come more slowly
constexpr milliseconds kDialTime{1000};    // for one address: one that cannot be reached may never say so
constexpr milliseconds kAnswerTime{3000};  // for an answer where any program can connect or listen
constexpr size_t kLongestHello = 4096;     // from a caller that has not shown yet that it is one of us

// The tags of what is said on a link, in this order.
constexpr uint64_t kHelloTag = 0;  // from the rank that dialled, then from the other
constexpr uint64_t kReadyTag = 1;
constexpr uint64_t kOverTag = 2;  // or kNewsTag instead

struct Hello {
  int32_t version;
  int32_t rank;
  int32_t size;
  int32_t tells;  // 1: news follow, and nothing else
  uint64_t secret;
};

void say_hello(Connection& connection, const Hello& hello) {
  connection.queue(kHelloTag, Packer().add(hello).take());
  connection.pump();
}

// Whether a socket that began to connect has connected: 1; 0 if not yet, -1 if it cannot.
int connected(int socket) {
  pollfd writable{socket, POLLOUT, 0};
  if (::poll(&writable, 1, 0) <= 0) return 0;
  int error = 0;
  socklen_t length = sizeof error;
  return ::getsockopt(socket, SOL_SOCKET, SO_ERROR, &error, &length) == 0 && error == 0 ? 1 : -1;
}

}  // namespace

Connecting::Connecting(std::unique_ptr<Way> way, int rank, int size, TimePoint deadline)
    : way_(std::move(way)), rank_(rank), size_(size), deadline_(deadline), peers_(size) {}

Connecting::~Connecting() { way_->stop_listening(); }

std::vector<Link> Connecting::take_links() {
  std::vector<Link> links;
  for (Peer& peer : peers_) links.push_back(std::move(peer.link));
  return links;
}

Status Connecting::run() {
  Status status = open();
  may_tell_ = status.ok() || descriptor_shortage() != 0;
  if (status.ok()) status = meet();
  if (status.ok()) {
    way_->stop_listening();
    listener_.reset();
    callers_.clear();
  } else {
    wake_.reset();  // its descriptor may be the one that telling the others needs
  }
  return status;
}

Status Connecting::open() {
  wake_ = Fd(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!wake_) return fail_to_open(size_, "make an eventfd");
  Status listens = way_->listen(rank_, size_, deadline_, &listener_);
  if (!listens.ok()) listener_.reset();
  return listens;
}

Status Connecting::meet() {
  for (;;) {
    TW_RETURN_IF_FAILED(step());
    if (complete()) return {};
    if (is_interrupted()) return fail(twInterrupted, "interrupted: {}", missing().sentence);
    if (Clock::now() >= deadline_) return missing();
    wait();
  }
}

// Looks once at everything that may have come. All callers are heard before any rank is found dead: a process that was
// started again may have taken the place of one that died.
Status Connecting::step() {
  for (int rank = 0; rank < size_; ++rank) {
    if (dials(rank)) TW_RETURN_IF_FAILED(dial(rank));
  }
  TW_RETURN_IF_FAILED(accept_all());
  for (Caller& caller : callers_) TW_RETURN_IF_FAILED(hear_caller(caller));
  std::erase_if(callers_, [](const Caller& caller) { return caller.done; });
  std::vector<int> dead;
  for (int rank = 0; rank < size_; ++rank) {
    Peer& peer = peers_[rank];
    if (peer.death == Death::kSure && !peer.link.made()) dead.push_back(rank);
    if (!peer.link.made() || !std::exchange(peer.stirred, false)) continue;
    const bool ended = peer.link.has_ended();  // asked first: what it said before its end is then here
    TW_RETURN_IF_FAILED(hear(rank));
    if ((ended || !peer.link.connection.open()) && !peer.over) dead.push_back(rank);
  }
  if (dead.empty()) return {};
  return fail(twPeerDied, "rank {} of {} is gone, before all ranks were connected", ranks_text(dead), size_);
}

// Whether all ranks have all links. A rank whose own links stand could leave before others have theirs, so all wait for
// all. A rank that has left in good order said so before, and is not dead to ranks that still wait for another's
// message.
bool Connecting::complete() {
  const auto all = [&](auto&& holds) {
    for (int rank = 0; rank < size_; ++rank) {
      if (rank != rank_ && !holds(peers_[rank])) return false;
    }
    return true;
  };
  if (!all([](const Peer& peer) { return peer.link.made(); })) return false;
  if (!ready_) tell_all(kReadyTag);
  ready_ = true;
  if (!all([](const Peer& peer) { return peer.ready; })) return false;
  tell_all(kOverTag);
  return true;
}

void Connecting::tell_all(uint64_t tag, const std::string& bytes) {
  for (Peer& peer : peers_) {
    if (!peer.link.made()) continue;
    peer.link.connection.queue(tag, bytes);
    peer.link.connection.pump();
    peer.stirred = true;  // what came meanwhile is not in the socket any more
  }
}

// Whether this rank dials another. A rank that fails before it listens is dialled by nobody, so it dials all to tell
// them.
bool Connecting::dials(int rank) const {
  if (news_.empty()) return rank < rank_ && !peers_[rank].link.made();
  return rank != rank_ && peers_[rank].owed && (rank < rank_ || !listener_);
}

void Connecting::hang_up(Peer& peer) {
  peer.dialled = Link();
  peer.greeted = peer.told = false;
  // Many ranks that dial many must not keep the host busy.
  const milliseconds most{std::max(20, size_ / 4)};
  peer.next = Clock::now() + std::min(most, kRetry * (1 << std::min(peer.attempts, 10)));
}

// Takes the attempt to reach a rank one step further; the rank may not listen yet.
Status Connecting::dial(int rank) {
  Peer& peer = peers_[rank];
  if (peer.dialled.made()) return greet(rank);
  if (Clock::now() < peer.next) return {};
  Fd socket;
  TW_RETURN_IF_FAILED(way_->dial(rank, peer.attempts++, &socket));
  if (!socket) {
    if (peer.death == Death::kSeen) peer.death = Death::kSure;
    hang_up(peer);
    return {};
  }
  peer.dialled = Link(Connection(std::move(socket)));
  peer.until = Clock::now() + kDialTime;
  return greet(rank);
}

Status Connecting::greet(int rank) {
  Peer& peer = peers_[rank];
  Connection& connection = peer.dialled.connection;
  const bool late = Clock::now() >= peer.until;
  bool dead = false;
  if (!peer.greeted) {
    const int now = connected(connection.fd());
    if (now < 0 && peer.death == Death::kSeen) peer.death = Death::kSure;
    if (now < 0 || (now == 0 && late)) hang_up(peer);
    if (now <= 0) return {};
    int pid = 0;
    TW_RETURN_IF_FAILED(way_->check(connection.fd(), &pid));
    TW_RETURN_IF_FAILED(watch(pid != 0 ? pid : way_->process(rank), &peer.dialled, &dead));
    say_hello(connection, {TW_VERSION, rank_, size_, news_.empty() ? 0 : 1, way_->secret()});
    peer.greeted = true;
    peer.until = way_->secret() != 0 ? Clock::now() + kAnswerTime : TimePoint::max();
  }
  const bool ended = dead || peer.dialled.has_ended();
  connection.pump();
  Parcel parcel;
  if (connection.take(kHelloTag, &parcel)) {
    if (Unpacker(parcel.bytes).get<Hello>().secret != way_->secret()) {
      hang_up(peer);
      return {};
    }
    if (news_.empty()) {
      adopt(rank, std::move(peer.dialled));
      return {};
    }
    connection.queue(kNewsTag, news_);
    connection.pump();
    peer.told = true;
  }
  if (ended || !connection.open()) {
    if (peer.told) peer.owed = false;
    pollfd process{peer.dialled.process.get(), POLLIN, 0};
    if (dead || (peer.dialled.process && ::poll(&process, 1, 0) > 0)) peer.death = Death::kSeen;
    hang_up(peer);
  } else if (late && way_->secret() != 0) {
    hang_up(peer);
  }
  return {};
}

Status Connecting::accept_all() {
  while (listener_) {
    Fd socket(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    // The kernel says that descriptors are short before it looks whether anybody calls.
    if (!socket && !expects_callers()) return {};
    if (!socket && (errno == EAGAIN || errno == EWOULDBLOCK)) return {};
    if (!socket && (errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS)) {
      return fail_to_open(size_, "accept a peer's connection");
    }
    if (!socket) continue;  // the caller has gone again
    Caller caller;
    if (!way_->check(socket.get(), &caller.pid).ok()) continue;  // turned away; the right one may still come
    caller.link = Link(Connection(std::move(socket)));
    caller.link.connection.limit(kLongestHello);
    caller.until = way_->secret() != 0 ? Clock::now() + kAnswerTime : TimePoint::max();
    callers_.push_back(std::move(caller));
  }
  return {};
}

Status Connecting::hear_caller(Caller& caller) {
  Connection& connection = caller.link.connection;
  connection.pump();
  Parcel parcel;
  if (!caller.answered && connection.take(kHelloTag, &parcel)) return answer(caller, parcel.bytes);
  std::string news;
  if (news_.empty() && caller.answered && connection.find(kNewsTag, &news)) return heard(news);
  caller.done = !connection.open() || (!caller.answered && Clock::now() >= caller.until);
  if (caller.done && caller.answered && caller.rank >= 0) peers_[caller.rank].owed = false;
  return {};
}

// Takes in a rank that has said who it is. Where that fails, the caller stays, to be told.
Status Connecting::answer(Caller& caller, const std::string& said) {
  Connection& connection = caller.link.connection;
  Unpacker reader(said);
  const Hello hello = reader.get<Hello>();
  caller.done = !reader.ok() || hello.secret != way_->secret();
  if (caller.done) return {};
  const bool known = hello.rank >= 0 && hello.rank < size_ && hello.rank != rank_;
  bool dead = false;
  if (caller.pid == 0 && known) caller.pid = way_->process(hello.rank);
  TW_RETURN_IF_FAILED(watch(caller.pid, &caller.link, &dead));
  if (dead || caller.link.has_ended()) {
    // The rank left before it was heard. If its process lives, or another has taken its place, it may call again.
    pollfd process{caller.link.process.get(), POLLIN, 0};
    dead |= caller.link.process && ::poll(&process, 1, 0) > 0;
    if (known && dead && hello.tells == 0 && !peers_[hello.rank].link.made()) peers_[hello.rank].death = Death::kSure;
    caller.done = true;
    return {};
  }
  if (!news_.empty() && !(known && peers_[hello.rank].owed)) {
    caller.done = true;  // another attempt of a rank that has heard the news
    return {};
  }
  say_hello(connection, {TW_VERSION, rank_, size_, 0, way_->secret()});
  caller.answered = true;
  if (known) caller.rank = hello.rank;
  if (!news_.empty()) {
    connection.queue(kNewsTag, news_);
    connection.pump();
    return {};
  }
  if (hello.version != TW_VERSION) {
    return fail(twConfigMismatch, "library version: rank {} has {}, rank {} has {}", rank_, TW_VERSION, hello.rank,
                hello.version);
  }
  if (hello.size != size_) {
    return fail(twConfigMismatch, "{}: rank {} has {}, rank {} has {}", Argument("nranks"), rank_, size_, hello.rank,
                hello.size);
  }
  if (!known || (hello.rank < rank_ && hello.tells == 0)) {
    return fail(twInvalidArgument, "a process says that it is rank {}; rank {} expected {}..{}", hello.rank, rank_,
                rank_ + 1, size_ - 1);
  }
  if (hello.tells != 0) {
    connection.limit(SIZE_MAX);
    return {};
  }
  Link& before = peers_[hello.rank].link;
  if (before.made() && !before.has_ended()) {
    return fail(twInvalidArgument, "two processes say that they are rank {}", hello.rank);
  }
  caller.done = true;
  adopt(hello.rank, std::move(caller.link));
  return {};
}

void Connecting::adopt(int rank, Link link) {
  Peer& peer = peers_[rank];
  link.connection.limit(SIZE_MAX);
  peer.link = std::move(link);
  peer.death = Death::kNone;
  peer.ready = peer.over = false;
  peer.stirred = true;
  // It has taken the place of a process that died after this rank's links stood, and has heard nothing of that.
  if (!ready_) return;
  peer.link.connection.queue(kReadyTag, {});
  peer.link.connection.pump();
}

Status Connecting::hear(int rank) {
  Peer& peer = peers_[rank];
  peer.link.connection.pump();
  Parcel parcel;
  if (peer.link.connection.take(kReadyTag, &parcel)) peer.ready = true;
  if (peer.link.connection.take(kOverTag, &parcel)) peer.over = true;
  std::string news;
  return peer.link.connection.find(kNewsTag, &news) ? heard(news) : Status{};
}

Status Connecting::heard(const std::string& news) {
  heard_ = true;
  return read_news(news);
}

Status Connecting::missing() const {
  std::vector<int> absent;
  std::vector<int> unready;
  for (int rank = 0; rank < size_; ++rank) {
    if (rank == rank_) continue;
    if (!peers_[rank].link.made()) absent.push_back(rank);
    if (!peers_[rank].ready) unready.push_back(rank);
  }
  if (!absent.empty()) {
    return fail(twTimeout, "rank {} of {} did not arrive in time to connect with rank {}", ranks_text(absent), size_,
                rank_);
  }
  return fail(twTimeout, "rank {} of {} did not arrive in time at all others", ranks_text(unready), size_);
}

// Watches the process behind a link, where it is known and the kernel can. A rank that only tells others may have one
// descriptor left, and needs it.
Status Connecting::watch([[maybe_unused]] int pid, [[maybe_unused]] Link* link, [[maybe_unused]] bool* dead) const {
#ifdef SYS_pidfd_open
  if (pid <= 0 || !news_.empty()) return {};
  link->process = Fd(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
  if (link->process) return {};
  *dead = errno == ESRCH;
  if ((errno == EMFILE || errno == ENFILE) && expects_callers()) return fail_to_open(size_, "watch a peer's process");
#endif
  return {};
}

// Waits until something comes, or it is time for another attempt.
void Connecting::wait() {
  std::vector<pollfd> watched;
  std::vector<Peer*> whose;  // whose the first entries are
  TimePoint until = std::min(deadline_, Clock::now() + kLook);
  for (Peer& peer : peers_) {
    if (!peer.link.made() || peer.over) continue;
    const bool output = peer.link.connection.has_output();
    watched.push_back({peer.link.connection.fd(), static_cast<short>(POLLIN | POLLRDHUP | (output ? POLLOUT : 0)), 0});
    watched.push_back({peer.link.process.get(), POLLIN, 0});  // poll skips -1
    whose.insert(whose.end(), 2, &peer);
    if (peer.stirred) until = TimePoint{};
  }
  for (int rank = 0; rank < size_; ++rank) {
    const Peer& peer = peers_[rank];
    if (!dials(rank)) continue;
    until = std::min(until, peer.dialled.made() ? peer.until : peer.next);
    watched.push_back({peer.dialled.connection.fd(), static_cast<short>(peer.greeted ? POLLIN : POLLOUT), 0});
    watched.push_back({peer.dialled.process.get(), POLLIN, 0});
  }
  for (const Caller& caller : callers_) watched.push_back({caller.link.connection.fd(), POLLIN, 0});
  // One who is not expected may have to stay where no descriptor is left, and poll would return at once.
  if (listener_ && expects_callers()) watched.push_back({listener_.get(), POLLIN, 0});
  const auto left = std::chrono::ceil<milliseconds>(until - Clock::now()).count();
  ::poll(watched.data(), watched.size(), static_cast<int>(std::max<int64_t>(left, 0)));
  for (size_t i = 0; i < whose.size(); ++i) whose[i]->stirred |= watched[i].revents != 0;
}

bool Connecting::tell(const Status& why) {
  if (!may_tell_) return false;
  const twResult_t code = why.code == twInterrupted ? twPeerAborted : why.code;  // their waits were not interrupted
  news_ = pack_news(heard_ ? Status{code, why.sentence} : fail(code, "rank {}: {}", rank_, why.sentence));
  tell_all(kNewsTag, news_);
  bool owes = false;
  for (int rank = 0; rank < size_; ++rank) {
    Peer& peer = peers_[rank];
    peer.owed = rank != rank_ && !peer.link.made() && peer.death == Death::kNone;
    peer.link = Link();
    if (peer.greeted) {  // it may have answered already, and would take this rank's end for a death
      peer.dialled.connection.queue(kNewsTag, news_);
      peer.dialled.connection.pump();
      peer.told = true;
    } else {
      hang_up(peer);
    }
  }
  for (Caller& caller : callers_) {
    if (!caller.answered) continue;
    caller.link.connection.queue(kNewsTag, news_);
    caller.link.connection.pump();  // the rank that it names is still owed the news: it may not be that rank
  }
  callers_.clear();
  for (const Peer& peer : peers_) owes |= peer.owed;
  return owes;
}

void Connecting::tell_late(const std::atomic<bool>& stop) {
  const auto owed = [](const Peer& peer) { return peer.owed; };
  while (!stop && Clock::now() < deadline_ && std::any_of(peers_.begin(), peers_.end(), owed)) {
    for (int rank = 0; rank < size_; ++rank) {
      if (dials(rank) && !dial(rank).ok()) hang_up(peers_[rank]);
    }
    const bool room = accept_all().ok();
    for (Caller& caller : callers_) (void)hear_caller(caller);
    std::erase_if(callers_, [](const Caller& caller) { return caller.done; });
    if (!room) ::usleep(10000);  // else poll would return at once: the listener has a caller for us
    wait();
  }
}

}  // namespace tw
