// The collective calls of the engine over libfabric: connecting, windows, closing. Each gathers what every rank has to
// say, so that what fails on one rank fails on all of them, by the same sentence.
#include <algorithm>
#include <random>
#include <thread>

#include "core/interrupt.h"
#include "net/fabric_engine.h"

namespace tw::net {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr const char* kConnecting = "connecting the engine between hosts";
constexpr const char* kAddingWindow = "adding a window of the engine between hosts";
constexpr milliseconds kLook{1};  // how often a wait looks whether it is over

}  // namespace

Status connect_fabric(const FabricOptions& options, const Meeting& meeting, std::unique_ptr<Engine>* engine) {
  std::unique_ptr<Endpoint> endpoint;
  const std::string address = options.provider == "tcp" ? own_address(*meeting.bootstrap, meeting.members) : "";
  const Status opened = open_endpoint(options.provider, address, &endpoint);
  return connect_endpoint(options, meeting, std::move(endpoint), opened, engine);
}

Status connect_endpoint(const FabricOptions& options, const Meeting& meeting, std::unique_ptr<Endpoint> endpoint,
                        const Status& opened, std::unique_ptr<Engine>* engine) {
  const std::string provider = opened.ok() ? endpoint->provider() : "";
  const std::string name = opened.ok() ? endpoint->name() : "";
  std::random_device random;
  const uint64_t secret = uint64_t{random()} << 32 | random();
  Packer card = pack_result(opened);
  card.add(secret).add_bytes(provider.data(), provider.size()).add_bytes(name.data(), name.size());
  std::vector<Parcel> cards;
  Bootstrap& bootstrap = *meeting.bootstrap;
  const Status met =
      gather(bootstrap, meeting.members, meeting.tag, {card.take(), {}}, meeting.deadline, kConnecting, &cards);
  if (!opened.ok()) return opened;
  TW_RETURN_IF_FAILED(met);
  std::vector<std::string> names;
  uint64_t shared = 0;
  for (size_t i = 0; i < cards.size(); ++i) {
    Unpacker reader(cards[i].bytes);
    TW_RETURN_IF_FAILED(read_result(meeting.members[i], reader));
    const auto theirs = reader.get<uint64_t>();
    if (i == 0) shared = theirs;
    if (const std::string other = reader.get_bytes(); other != provider) {
      return fail(twCallMismatch, "rank {} has libfabric's provider {}, and this rank has {}", meeting.members[i],
                  other, provider);
    }
    names.push_back(reader.get_bytes());
  }
  auto made = std::make_unique<FabricEngine>(options, meeting, std::move(endpoint));
  Status ready = made->start(names, shared);
  if (ready.ok()) ready = made->greet(meeting);
  // Who was refused knows at once, and nobody then waits for its greeting.
  TW_RETURN_IF_FAILED(agree(bootstrap, meeting.members, meeting.tag + 1, meeting.deadline, kConnecting, ready));
  ready = made->await_greetings(meeting);
  TW_RETURN_IF_FAILED(agree(bootstrap, meeting.members, meeting.tag + 2, meeting.deadline, kConnecting, ready));
  *engine = std::move(made);
  return {};
}

template <class Awaited>
Status FabricEngine::await(const Meeting& meeting, const char* what, const Awaited& awaited) {
  auto next_look = Clock::now() + kLookForLife;
  for (;;) {
    std::vector<int> missing;
    {
      const std::lock_guard lock(mutex_);
      for (int peer = 0; peer < size(); ++peer) {
        if (peer != me_ && !peer_at(peer).queue->failed() && awaited(peer_at(peer))) missing.push_back(peer);
      }
    }
    if (missing.empty()) return {};
    const auto now = Clock::now();
    if (is_interrupted()) return fail(twInterrupted, "{} was interrupted", what);
    for (const int peer : missing) {
      const int member = members_[static_cast<size_t>(peer)];
      if (now >= meeting.deadline) {
        give_up(peer, fail(twTimeout, "{}: rank {} was not heard of in time", what, member));
      } else if (now >= next_look && !meeting.bootstrap->alive(member)) {
        give_up(peer, fail(twPeerDied, "{}: rank {} is gone", what, member));
      }
    }
    if (now >= next_look) next_look = now + kLookForLife;
    if (!poll()) std::this_thread::sleep_for(kLook);
  }
}

Status FabricEngine::greet(const Meeting& meeting) {
  {
    const std::lock_guard lock(mutex_);
    for (Peer& peer : peers_) {
      if (peer.queue != nullptr) peer.queue->take(note_of(Note::kHello));
    }
    wake();
  }
  TW_RETURN_IF_FAILED(await(meeting, kConnecting, [](const Peer& peer) { return !peer.queue->idle(); }));
  return unreached();
}

Status FabricEngine::await_greetings(const Meeting& meeting) {
  TW_RETURN_IF_FAILED(await(meeting, kConnecting, [](const Peer& peer) { return !peer.greeted; }));
  return unreached();
}

Status FabricEngine::unreached() const {
  for (int peer = 0; peer < size(); ++peer) {
    const Status failed = failure(peer);
    if (!failed.ok()) return fail(twUnsupported, "{}", failed.sentence);
  }
  return {};
}

Status FabricEngine::add_window(const Meeting& meeting, std::byte* memory, uint64_t bytes, int* window) {
  Registered registered;
  Status made;
  if (memory == nullptr || bytes == 0) {
    made = fail(twInvalidArgument, "a window of {} bytes at {} is none", bytes, static_cast<const void*>(memory));
  } else {
    const std::lock_guard lock(mutex_);
    made = endpoint_->add_memory(memory, bytes, &registered);
  }
  int number = -1;
  {
    // Peers' words may come as soon as they know of the window.
    const std::lock_guard lock(mutex_);
    number = windows_.add({memory, made.ok() ? bytes : 0, registered.tag, {}});
  }
  Packer card = pack_result(made);
  card.add(number).add(registered.extent);
  std::vector<Parcel> cards;
  Status all_made = gather(*meeting.bootstrap, meeting.members, meeting.tag, {card.take(), {}}, meeting.deadline,
                           kAddingWindow, &cards);
  std::vector<Extent> extents;
  for (size_t i = 0; i < cards.size() && all_made.ok(); ++i) {
    Unpacker reader(cards[i].bytes);
    all_made = read_result(meeting.members[i], reader);
    if (all_made.ok() && reader.get<int>() != number) {
      all_made = fail(twCallMismatch, "rank {} has another number of windows than this rank", meeting.members[i]);
    }
    extents.push_back(reader.get<Extent>());
  }
  const std::lock_guard lock(mutex_);
  if (!made.ok() || !all_made.ok()) {
    windows_.take_back();
    return made.ok() ? all_made : made;
  }
  windows_[number].extents = std::move(extents);
  *window = number;
  return {};
}

Status FabricEngine::close(const Meeting& meeting) {
  static constexpr const char* kClosing = "closing the engine between hosts";
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    for (Peer& peer : peers_) {
      if (peer.queue != nullptr && !peer.queue->failed()) peer.queue->take(note_of(Note::kBye));
    }
    wake();
  }
  // A bye comes behind all that its sender put.
  const Status heard = await(meeting, kClosing, [](const Peer& peer) { return !peer.left || !peer.queue->idle(); });
  // And here all whose byes have come know that theirs has.
  TW_RETURN_IF_FAILED(heard);
  std::vector<Parcel> nothing;
  (void)meeting.bootstrap->exchange(meeting.members, meeting.tag, {}, meeting.deadline, &nothing);
  for (int peer = 0; peer < size(); ++peer) {
    if (Status failed = failure(peer); !failed.ok()) return failed;
  }
  return {};
}

}  // namespace tw::net
