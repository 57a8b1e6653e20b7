// Makes and grows the transport between hosts (cpu/fabric_transport.h). Ranks of a host share windows, words and lists
// among themselves; then all ranks say whether they could, connect their engines, and show them that memory. A rank
// that fails on its own tells the others before anybody waits in the engine's meetings.
#include <algorithm>

#include "core/make_backend.h"
#include "core/near.h"
#include "cpu/fabric_transport.h"

namespace tw::cpu {
namespace {

// Meetings, as offsets from a tag. The first are among the ranks of a host, the others of all ranks; posts have tags of
// their own.
enum FabricStage : uint64_t {
  kWindowsStage,
  kWordsStage,
  kListsStage,
  kSharedStage,
  kEngineStage,
  kListsWindowStage = kEngineStage + 3,
  kWindowStage = kListsWindowStage + 3,
  kWordsWindowStage = kWindowStage + 3,
};

constexpr char kConnecting[] = "connecting the ranks of several hosts";
constexpr std::chrono::seconds kLastPuts{2};  // for what this rank has sent to go out, before its engine ends

}  // namespace

FabricTransport::FabricTransport(const BackendInit& init, Windows windows, const Topology& topology)
    : CpuTransport(init, std::move(windows)),
      topology_(topology),
      map_(init.context->map),
      folds_(topology.divides_into(init.context->domains.size)),
      hosts_map_(HostsMap::make(topology, map_, init.context->replicas.size, folds_)),
      tag_(init.tag),
      replicas_(init.context->replicas.size),
      inbound_(static_cast<size_t>(topology.size())),
      messages_(static_cast<size_t>(topology.hosts())),
      shipped_(static_cast<size_t>(topology.hosts())),
      published_(static_cast<size_t>(topology.hosts())) {
  const auto places = static_cast<size_t>(map_.shape().channels) * HostsMap::kBanks;
  words_told_.assign(places * topology.ranks.size(), pack({init.context->first_step, Mode::kNone, 0}));
  rows_told_.assign(places * topology.host.size(), 0);
  in_place_.resize(places);
  const int mine = topology_.host[me_];
  for (int rank = 0; rank < topology_.size(); ++rank) {
    if (topology_.host[rank] != mine) inbound_[rank] = {topology_.rail_peer(rank, mine), topology_.list(rank, mine)};
  }
}

FabricTransport::~FabricTransport() {
  agent_.reset();  // it posts
  // Ranks that have come through the last step together have nothing under way. Of others, what this rank has sent
  // shall arrive, as it would in memory that they share.
  const TimePoint until = std::chrono::steady_clock::now() + kLastPuts;
  const auto idle = [&](int peer) {
    return is_near(peer) || !engine_->failure(peer).ok() || engine_->done(peer) == engine_->taken(peer) ||
           !bootstrap_->alive(members_[peer]);
  };
  for (int peer = 0; engine_ != nullptr && peer < ranks(); ++peer) {
    while (!idle(peer) && std::chrono::steady_clock::now() < until) {
      if (!engine_->poll()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }
}

Status FabricTransport::make(const BackendInit& init, std::shared_ptr<FabricTransport>* made) {
  const Topology topology = init.hosts->topology(init.members);
  const Near near(init, topology);
  Windows mates;
  Status ready = map_windows(near.init, &mates);
  Windows windows;
  windows.cores = mates.cores * topology.size() / static_cast<int>(near.ranks.size());
  windows.by_rank.resize(static_cast<size_t>(topology.size()));
  for (size_t i = 0; i < mates.by_rank.size(); ++i) windows.by_rank[near.ranks[i]] = mates.by_rank[i];
  std::shared_ptr<FabricTransport> transport(new FabricTransport(init, std::move(windows), topology));
  const HostsMap& map = transport->hosts_map_;
  if (map.hosts > 1) {
    const auto fill = [&](std::byte* words) {
      for (int channel = 0; channel < map.channels; ++channel) {
        for (int place = 0; place < HostsMap::kBanks * map.lists; ++place) {
          const uint64_t word = map.word(channel, place / map.lists, place % map.lists);
          *reinterpret_cast<uint64_t*>(words + word) = pack({init.context->first_step, Mode::kNone, 0});
        }
      }
    };
    ready = transport->share(init, init.tag + kWordsStage, ready, map.words_bytes(), fill, &transport->words_);
    ready = transport->share(init, init.tag + kListsStage, ready, map.lists_bytes(), {}, &transport->lists_);
  }
  TW_RETURN_IF_FAILED(agree(*init.bootstrap, init.members, init.tag + kSharedStage, init.deadline, kConnecting, ready));
  if (map.hosts > 1) TW_RETURN_IF_FAILED(transport->connect(init));
  transport->asking_ = std::make_unique<Asking>(
      init.bootstrap, std::vector<int>(init.members.begin(), init.members.end()), init.tag + kAskingPost);
  *made = std::move(transport);
  return {};
}

// `ready`: how this rank's part before it went. Mates hear of a failure here, and wait for nobody.
Status FabricTransport::share(const BackendInit& init, uint64_t tag, const Status& ready, uint64_t bytes,
                              const std::function<void(std::byte*)>& fill, Shared* shared) const {
  const Near near(init, topology_);
  SharedMemory memory;
  const auto fill_in = [&](std::byte* begin) {
    if (fill) fill(begin);
  };
  TW_RETURN_IF_FAILED(
      share_memory(*near.init.bootstrap, near.members, tag, init.deadline, bytes, false, fill_in, "", &memory, ready));
  shared->of.resize(static_cast<size_t>(topology_.size()));
  for (size_t i = 0; i < memory.by_rank.size(); ++i) shared->of[near.ranks[i]] = memory.by_rank[i];
  return {};
}

Status FabricTransport::connect(const BackendInit& init) {
  const auto meeting = [&](uint64_t stage) {
    return net::Meeting{init.bootstrap, init.members, init.tag + stage, init.deadline};
  };
  TW_RETURN_IF_FAILED(init.hosts->connect(meeting(kEngineStage), &engine_));
  if (folds_) agent_ = std::make_unique<FoldAgent>();
  TW_RETURN_IF_FAILED(engine_->add_window(meeting(kListsWindowStage), lists_.of[me_]->data(), hosts_map_.lists_bytes(),
                                          &lists_.number));
  int number = -1;
  TW_RETURN_IF_FAILED(engine_->add_window(meeting(kWindowStage), windows_[me_]->data(), map_.bytes(), &number));
  pieces_.push_back({0, map_.bytes(), number});
  return engine_->add_window(meeting(kWordsWindowStage), words_.of[me_]->data(), hosts_map_.words_bytes(),
                             &words_.number);
}

// Makes memory for the lists of next_hosts_map_. `ready`: how this rank's part before it went.
Status FabricTransport::share_next_lists(const BackendInit& init, const Status& ready) {
  const Status shared = share(init, init.tag + kListsStage, ready, next_hosts_map_.lists_bytes(), {}, &next_lists_);
  TW_RETURN_IF_FAILED(
      agree(*init.bootstrap, init.members, init.tag + kSharedStage, init.deadline, kConnecting, shared));
  const net::Meeting meeting{init.bootstrap, init.members, init.tag + kListsWindowStage, init.deadline};
  return engine_->add_window(meeting, next_lists_.of[me_]->data(), next_hosts_map_.lists_bytes(), &next_lists_.number);
}

Status FabricTransport::place(const BackendInit& init) {
  if (engine_ == nullptr) return {};
  const bool folds = this->folds(init.context->domains);  // else its partials travel as they are, to the same bits
  const HostsMap needed = HostsMap::make(topology_, init.context->map, init.context->replicas.size, folds);
  if (hosts_map_.holds(needed)) return {};
  next_map_ = map_;
  next_hosts_map_ = hosts_map_.with(needed);
  Status made = share_next_lists(init, {});
  end_growth(made.ok());
  return made;
}

Status FabricTransport::prepare_growth(const BackendInit& init, const WindowMap& grown) {
  next_map_ = grown;
  next_hosts_map_ = HostsMap::make(topology_, grown, replicas_, folds_).with(hosts_map_);
  const Near near(init, topology_);
  std::vector<std::shared_ptr<Mapping>> mates;
  for (const int rank : near.ranks) mates.push_back(windows_[rank]);
  const Status ready = grow_memory(*near.init.bootstrap, near.members, init.tag + kWindowsStage, init.deadline,
                                   grown.channels(), grown.channels_bytes(), mates);
  if (engine_ == nullptr) return ready;
  TW_RETURN_IF_FAILED(share_next_lists(init, ready));
  const net::Meeting meeting{init.bootstrap, init.members, init.tag + kWindowStage, init.deadline};
  int number = -1;
  TW_RETURN_IF_FAILED(
      engine_->add_window(meeting, windows_[me_]->data() + grown.channels(), grown.channels_bytes(), &number));
  pieces_.insert(pieces_.begin(), {grown.channels(), grown.channels_bytes(), number});
  return {};
}

void FabricTransport::end_growth(bool grown) {
  if (engine_ == nullptr) {
    if (grown) map_ = next_map_;
    return;
  }
  // The engine knows this memory until it ends.
  former_.push_back(grown ? std::move(lists_) : std::move(next_lists_));
  if (grown) {
    map_ = next_map_;
    hosts_map_ = next_hosts_map_;
    lists_ = std::move(next_lists_);
  }
  next_lists_ = {};
}

}  // namespace tw::cpu
