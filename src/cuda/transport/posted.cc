// Memory, network and launches of posted blocks: posted.h tells what they are for.
//
// create(), make_arrivals() and prepare_growth() are collective; a rank that fails on its own tells the others before
// anybody waits in the network's meetings. The rest only enqueues on the caller's stream; abort() may come from any
// thread.
//
// What breaks if this changes: where a block lies here and there must follow from what all ranks have alike (S10); the
// window must be ready before a peer can put into it (S2).
#include "cuda/transport/posted.h"

#include <algorithm>
#include <thread>

#include "cuda/launch/posts.h"
#include "cuda/transport/tables.h"

namespace tw::cuda {
namespace {

// Meetings, as offsets from a tag, in the order in which they are (bootstrap/socket.h). The first four are among the
// ranks of a host.
enum PostedStage : uint64_t {
  kWindowStage,
  kOutStage,
  kArrivalsStage,
  kInboxStage,
  kReadyStage,
  kNetworkStage,
  kAddWindowStage = kNetworkStage + 4,
  kAddOutStage = kAddWindowStage + 3,
  kAddArrivalsStage = kAddOutStage + 3,
  kAddInboxStage = kAddArrivalsStage + 3,
  kGateStage = kAddInboxStage + 3,
  kEndStage = kGateStage + 2,
};
static_assert(kEndStage <= PostedTransport::kTags);

constexpr char kConnectingDevices[] = "connecting the devices of several hosts";

// Tells the others how this rank's part went, and finds out how many ranks are on its device: where hosts are made of
// one for trials, ranks of several are.
Status meet_devices(const BackendInit& init, uint64_t tag, const Status& mine, int* sharing) {
  const Uuid uuid = uuid_of(init.device);
  std::vector<Parcel> all;
  Status met = gather(*init.bootstrap, init.members, tag, {pack_result(mine).add(uuid).take(), {}}, init.deadline,
                      kConnectingDevices, &all);
  TW_RETURN_IF_FAILED(mine);
  TW_RETURN_IF_FAILED(std::move(met));
  *sharing = 0;
  for (size_t rank = 0; rank < all.size(); ++rank) {
    Unpacker reader(all[rank].bytes);
    TW_RETURN_IF_FAILED(read_result(init.members[rank], reader));
    *sharing += reader.get<Uuid>() == uuid ? 1 : 0;
  }
  return {};
}

}  // namespace

PostedTransport::PostedTransport(const BackendInit& init, const Topology& topology)
    : map_(init.context->map),
      posts_(PostsMap::make(map_, map_.room().loads)),
      crossing_(init.hosts->crossing),
      uses_(init.hosts->uses_of_inboxes(topology.divides_into(init.context->domains.size))),
      crosses_once_(uses_.rows),
      device_(init.device),
      topology_(topology) {
  inboxes_ = InboxMap::make(topology_, map_, uses_);
}

PostedTransport::~PostedTransport() {
  network_.reset();
  for (void* const table : tables_) cudaFree(table);
  cudaFree(told_);
  cudaFree(arrived_);
}

Status PostedTransport::create(const BackendInit& init, uint64_t tag, DeviceWindows* windows,
                               std::unique_ptr<StagedTransport>* made) {
  const Topology topology = init.hosts->topology(init.members);
  std::unique_ptr<PostedTransport> posted(new PostedTransport(init, topology));
  const Near near(init, topology);
  const Status mapped = map_device_windows(near.init, tag + kWindowStage, &posted->window_.near);
  const Status ready = posted->make(init, tag, mapped);
  int sharing = 0;
  TW_RETURN_IF_FAILED(meet_devices(init, tag + kReadyStage, ready, &sharing));
  const net::Meeting meeting{init.bootstrap, init.members, tag + kNetworkStage, init.deadline};
  TW_RETURN_IF_FAILED(connect_network(init, meeting, posted->map_.shape().channels, &posted->network_));
  const WindowMap& map = posted->map_;
  int number = -1;
  TW_RETURN_IF_FAILED(posted->add(init, tag + kAddWindowStage, posted->window_, 0, map.bytes(), &number));
  posted->window_.number = number;
  posted->pieces_.push_back({0, map.bytes(), number});
  TW_RETURN_IF_FAILED(posted->add(init, tag + kAddOutStage, posted->out_, 0,
                                  posted->posts_.outgoing_bytes() + posted->inboxes_.outgoing_bytes(),
                                  &posted->out_.number));
  if (map.shape().exact()) {
    TW_RETURN_IF_FAILED(posted->add(init, tag + kAddArrivalsStage, posted->arrivals_, 0, posted->posts_.arrival_bytes(),
                                    &posted->arrivals_.number));
  }
  if (posted->inboxes_.message != 0) {
    TW_RETURN_IF_FAILED(posted->add(init, tag + kAddInboxStage, posted->inbox_, 0, posted->inboxes_.inbox_bytes(),
                                    &posted->inbox_.number));
    if (posted->crosses_once_) TW_RETURN_IF_FAILED(posted->pass_gate(init, tag));
  }
  // Kernels find the own window alone by the group's tables: what is for others goes out by this transport.
  *windows = posted->window_.near;
  windows->by_rank.assign(init.members.size(), posted->window_.near.by_rank[static_cast<size_t>(posted->window_.me)]);
  windows->links = twLinksOther;
  windows->sharing = sharing;
  *made = std::move(posted);
  return {};
}

// Makes what this rank, or its host's ranks, make alone. `mapped`: how mapping windows went. Mates meet in any case.
Status PostedTransport::make(const BackendInit& init, uint64_t tag, const Status& mapped) {
  const Near near(init, topology_);
  window_.me = static_cast<int>(std::ranges::find(near.ranks, init.context->me) - near.ranks.begin());
  Status ready = mapped;
  if (posts_.told > INT32_MAX) ready = fail(twUnsupported, "load statistics of so many ranks and experts do not fit");
  if (ready.ok()) ready = tabulate(near, &window_);
  ready = make_outgoing(init, near, tag + kOutStage, ready, posts_.outgoing_bytes() + inboxes_.outgoing_bytes(), &out_);
  if (map_.shape().exact()) ready = share(near, tag + kArrivalsStage, ready, posts_.arrival_bytes(), &arrivals_);
  if (inboxes_.message != 0) ready = share(near, tag + kInboxStage, ready, inboxes_.inbox_bytes(), &inbox_);
  TW_RETURN_IF_FAILED(std::move(ready));
  const auto ranks = static_cast<size_t>(map_.shape().ranks);
  if (inboxes_.message != 0) {
    TW_RETURN_IF_FAILED(routes_.make(topology_, init.context->me, map_.shape().channels));
  }
  const auto channels = static_cast<size_t>(map_.shape().channels);
  TW_RETURN_IF_FAILED(allocate(channels * ranks, &arrived_));
  const uint64_t first = pack({init.context->first_step, Mode::kNone, 0});
  return upload(std::vector<uint64_t>(2 * channels * ranks, first), &told_);
}

Status PostedTransport::share(const Near& near, uint64_t tag, const Status& ready, uint64_t bytes, Memory* memory) {
  memory->me = window_.me;
  TW_RETURN_IF_FAILED(share_device_memory(
      near.init, tag, ready, bytes, [bytes](std::byte* data) { return clear(data, bytes); }, &memory->near));
  return tabulate(near, memory);
}

// What goes out nobody else maps, unless mates fold it.
Status PostedTransport::make_outgoing(const BackendInit& init, const Near& near, uint64_t tag, const Status& ready,
                                      uint64_t bytes, Memory* memory) {
  if (uses_.folds) return share(near, tag, ready, bytes, memory);
  TW_RETURN_IF_FAILED(ready);
  const Driver* driver = nullptr;
  TW_RETURN_IF_FAILED(find_driver(&driver));
  std::shared_ptr<DeviceMapping> own;
  TW_RETURN_IF_FAILED(
      DeviceMapping::create(*driver, init.device, {init.device}, bytes, handle_kinds(init, *driver), &own));
  memory->near.by_rank = {own};
  memory->me = 0;
  return clear(own->data(), bytes);  // nothing of what was there before leaves
}

Status PostedTransport::tabulate(const Near& near, Memory* memory) {
  std::vector<std::byte*> begins(static_cast<size_t>(topology_.size()));
  for (size_t i = 0; i < near.ranks.size(); ++i) {
    begins[static_cast<size_t>(near.ranks[i])] = memory->near.by_rank[i]->data();
  }
  TW_RETURN_IF_FAILED(upload(begins, &memory->table));
  tables_.push_back(memory->table);
  return {};
}

Status PostedTransport::add(const BackendInit& init, uint64_t tag, const Memory& memory, uint64_t begin, uint64_t bytes,
                            int* number) {
  const net::Meeting meeting{init.bootstrap, init.members, tag, init.deadline};
  return network_->add_memory(meeting, memory.data() + begin, bytes, number);
}

Status PostedTransport::make_arrivals(const BackendInit& init) {
  if (arrivals_.number >= 0) return {};  // alike on all ranks, as it comes last
  const Near near(init, topology_);
  const uint64_t bytes = posts_.arrival_bytes();
  Memory made;
  Status ready = share(near, init.tag + kArrivalsStage, {}, bytes, &made);
  ready = agree(*init.bootstrap, init.members, init.tag + kReadyStage, init.deadline, kConnectingDevices, ready);
  if (ready.ok()) ready = add(init, init.tag + kAddArrivalsStage, made, 0, bytes, &made.number);
  if (ready.ok()) {
    arrivals_ = std::move(made);
  } else {
    former_.push_back(std::move(made));  // the network may know it
  }
  return ready;
}

// The window grows where it is; what goes out and what arrives is made anew.
Status PostedTransport::prepare_growth(const BackendInit& init, WindowMap* grown) {
  const Near near(init, topology_);
  next_map_ = *grown;
  next_posts_ = PostsMap::make(*grown, 0);
  next_posts_.told = posts_.told;  // load statistics stay what they are
  next_inboxes_ = InboxMap::make(topology_, *grown, uses_);
  next_out_ = next_arrivals_ = next_inbox_ = {};
  const uint64_t outgoing = next_posts_.outgoing_bytes() + next_inboxes_.outgoing_bytes();
  const uint64_t arriving = arrivals_.number >= 0 ? next_posts_.arrival_bytes() : 0;
  const uint64_t inboxes = next_inboxes_.inbox_bytes();
  Status ready = grow_device_windows(near.init, init.tag + kWindowStage, *grown, window_.near);
  ready = make_outgoing(init, near, init.tag + kOutStage, ready, outgoing, &next_out_);
  if (arriving > 0) ready = share(near, init.tag + kArrivalsStage, ready, arriving, &next_arrivals_);
  if (inboxes > 0) ready = share(near, init.tag + kInboxStage, ready, inboxes, &next_inbox_);
  TW_RETURN_IF_FAILED(agree(*init.bootstrap, init.members, init.tag + kReadyStage, init.deadline, kConnectingDevices,
                            std::move(ready)));
  Piece piece{grown->channels(), grown->channels_bytes(), -1};  // for the network, once it has it
  TW_RETURN_IF_FAILED(add(init, init.tag + kAddWindowStage, window_, piece.begin, piece.bytes, &piece.number));
  pieces_.insert(pieces_.begin(), piece);
  TW_RETURN_IF_FAILED(add(init, init.tag + kAddOutStage, next_out_, 0, outgoing, &next_out_.number));
  if (arriving > 0) {
    TW_RETURN_IF_FAILED(add(init, init.tag + kAddArrivalsStage, next_arrivals_, 0, arriving, &next_arrivals_.number));
  }
  return inboxes == 0 ? Status{} : add(init, init.tag + kAddInboxStage, next_inbox_, 0, inboxes, &next_inbox_.number);
}

// What the network knows stays until it ends, and a window's part with it, so that a group may not grow there again.
void PostedTransport::end_growth(bool grown, bool certain) {
  const bool known = !pieces_.empty() && pieces_.front().begin == next_map_.channels();
  if (!grown && certain && !known) drop_growth(window_.near, window_.me, false, next_map_);
  if (grown) {
    std::swap(out_, next_out_);
    std::swap(arrivals_, next_arrivals_);
    std::swap(inbox_, next_inbox_);
    map_ = next_map_;
    posts_ = next_posts_;
    inboxes_ = next_inboxes_;
  }
  for (Memory* const each : {&next_out_, &next_arrivals_, &next_inbox_}) former_.push_back(std::move(*each));
  next_out_ = next_arrivals_ = next_inbox_ = {};
}

void PostedTransport::abort() {
  if (network_ != nullptr) network_->abort();
}

// ------------------------------------------------------------------------------------------------------------- steps

void PostedTransport::place(StepPlace at, const WindowMap& map, GroupView* view) const {
  const auto banks = reinterpret_cast<uintptr_t>(out_.data() + posts_.banks_at(at.channel, map));
  view->out = reinterpret_cast<std::byte*>(banks - map.bank(at.channel, 0));
  view->out_signals = out_.data() + posts_.told_at(at.channel);
  view->posts = static_cast<int32_t>(posts_.told);
}

NetPlace PostedTransport::in_window(uint64_t offset) const {
  const auto piece = std::ranges::find_if(pieces_, [&](const Piece& each) { return offset - each.begin < each.bytes; });
  return {piece->number, offset - piece->begin};
}

PostSignals PostedTransport::signals_of(int channel) const {
  const uint64_t to = map_.signal(channel, 0, 0);
  const uint64_t from = posts_.told_at(channel);
  const auto ranks = static_cast<uint64_t>(map_.shape().ranks);
  return {{out_.number, from},
          in_window(to),
          out_.data() + from,
          {window_.table, to},
          told_ + 2 * ranks * static_cast<uint64_t>(channel)};
}

// map: the group's, whose banks may lie where those of a smaller map did (core/arena.h).
void PostedTransport::add_regions(const WindowMap& map, int channel, const Blocks& blocks, PostParams* p) const {
  const uint64_t bank = blocks.land ? posts_.arrivals_at(channel) : map.bank(channel, 0);
  for (const Region& region : blocks.regions) {
    if (region.bytes == 0) continue;
    const uint64_t from = posts_.banks_at(channel, map) + region.begin;
    const uint64_t to = bank + region.begin;
    p->regions[p->count++] = {{out_.number, from},
                              blocks.land ? NetPlace{arrivals_.number, to} : in_window(to),
                              out_.data() + from,
                              {(blocks.land ? arrivals_ : window_).table, to},
                              region.bytes,
                              region.row,
                              PostsMap::stride_of(map),
                              blocks.land ? posts_.arrival : PostsMap::stride_of(map),
                              0};
  }
  p->loads = -1;
  if (blocks.loads.bytes == 0) return;
  p->loads = p->count;
  const uint64_t from = posts_.told_at(channel) + outgoing_loads(map_.shape().ranks);
  const uint64_t all = blocks.loads.bytes * static_cast<uint64_t>(map_.shape().ranks);
  p->regions[p->count++] = {{out_.number, from},
                            in_window(blocks.loads.begin),
                            out_.data() + from,
                            {window_.table, blocks.loads.begin},
                            blocks.loads.bytes,
                            0,
                            posts_.told,
                            all,
                            0};
}

Status PostedTransport::begin(const GroupView& view, const MovedStep& step) {
  if (!step.has_bank) return {};
  const PaceParams p{view, network_->view(), signals_of(step.at.channel), step.phase, step.at.channel, step.at.bank(),
                     0};
  return launched("a step that is left out", launch_pace(p, step.stream));
}

PostParams PostedTransport::params_of(const GroupView& view, const MovedStep& step, const Blocks& blocks) const {
  const int channel = step.at.channel;
  PostParams p{};
  p.group = view;
  p.net = network_->view();
  p.signals = signals_of(channel);
  p.phase = step.phase;
  p.channel = channel;
  add_regions(view.map, channel, blocks, &p);
  place_messages(blocks, &p);
  return p;
}

Status PostedTransport::start(const GroupView& view, const MovedStep& step, const Blocks& blocks, bool) {
  constexpr uint64_t kEach = 64 << 10;  // bytes for a rank of this host that are worth a block
  constexpr uint64_t kMostParts = 16;
  PostParams p = params_of(view, step, blocks);
  p.first = blocks.first;
  p.ranks = blocks.ranks > 0 ? blocks.ranks : map_.shape().ranks;
  p.arrived = arrived_ + static_cast<size_t>(map_.shape().ranks) * static_cast<size_t>(p.channel);
  uint64_t most = 0;
  for (const Region& region : blocks.regions) most += region.bytes;
  // As many blocks as the step may have, for the ranks of this host together, this one too.
  const auto mates = static_cast<int>(topology_.mates(view.me).size());
  const auto each = static_cast<uint64_t>(std::max(1, step.blocks / mates));
  p.parts = static_cast<int>(std::clamp<uint64_t>(most / kEach, 1, std::min(each, kMostParts)));
  if (blocks.folds) return post_folds(p, step, blocks);
  if (p.once.ranks != nullptr && !blocks.all && blocks.sent.tokens > 0) {
    TW_RETURN_IF_FAILED(launched("messages to hosts", launch_pack(p, step.blocks, step.stream)));
  }
  return launched("the posts of a step", launch_post(p, step.stream));
}

Status PostedTransport::join(const GroupView& view, const MovedStep& step, const Blocks& blocks) {
  PostParams p = params_of(view, step, blocks);
  if (p.once.ranks != nullptr) {
    const int far = map_.shape().ranks - static_cast<int>(topology_.mates(view.me).size());
    p.parts = std::max(1, step.blocks / std::max(1, far));
    const int most = std::max(1, std::min(step.blocks, far * p.parts));  // S8: they wait
    TW_RETURN_IF_FAILED(launched("rows of other hosts", launch_pull(p, most, step.stream)));
  }
  if (step.waits) return {};
  const int32_t local = blocks.folds ? topology_.most_local() : 0;
  const PaceParams pace{view, p.net, p.signals, step.phase, step.at.channel, -1, local};
  TW_RETURN_IF_FAILED(launched("a wait for signals", launch_await_signals(pace, step.stream)));
  if (!blocks.folds || blocks.sent.tokens == 0) return {};
  return launched("folds of other hosts", launch_unfold(place_folds(p, step, blocks), step.blocks, step.stream));
}

// ------------------------------------------------------------------------------------------ rows once for each host

// The messages of a channel, in whatever regions.
HostRows PostedTransport::host_rows(int channel) const {
  HostRows rows{};
  routes_.place(channel, &rows);
  const uint64_t out = posts_.outgoing_bytes() + inboxes_.outgoing_at(channel);
  const uint64_t in = inboxes_.inbox_at(channel);
  rows.from = {out_.number, out};
  rows.at = out_.data() + out;
  rows.to = {inbox_.number, in};
  rows.near = {inbox_.table, in};
  rows.message = inboxes_.message;
  rows.bank_here = inboxes_.outgoing_bank();
  rows.bank_there = inboxes_.inbox_bank();
  return rows;
}

// Has a step's rows go to each host once, where that is faster or the caller's wish. A row then crosses the network
// once for each host and not for each rank, but is copied twice more, and waits for two kernels: some 10 us, in which a
// link of 50 GB/s carries half a MiB. With choices that fall anywhere it would carry about twice the rows otherwise.
// Told by blocks, which are alike on all ranks.
void PostedTransport::place_messages(const Blocks& blocks, PostParams* p) const {
  constexpr uint64_t kWorth = 512 << 10;  // not measured over a network
  if (inboxes_.message == 0 || !crosses_once_) return;
  uint64_t in_message[kMostPosts] = {};
  uint64_t bound = 0;
  uint64_t rows = 0;  // bytes
  uint64_t end = 0;
  int number = 0;
  for (const Region& region : blocks.regions) {
    if (region.bytes == 0) continue;  // as in add_regions
    const int at = number++;
    if (!region.same || region.row == 0) continue;
    if (rows == 0) bound = region.bytes / region.row, end = inboxes_.rows_at(bound);
    in_message[at] = end;
    rows += region.bytes;
    end += InboxMap::align(region.bytes);
  }
  if (rows == 0 || end > inboxes_.message || !are_worth_it(rows, kWorth)) return;
  for (int i = 0; i < number; ++i) p->regions[i].in_message = in_message[i];
  p->once = host_rows(p->channel);
  p->once.bound = static_cast<int32_t>(bound);
  p->once.all = blocks.all ? 1 : 0;
  p->sent = blocks.sent;
}

// Finds out whether ranks see what the network puts at their mates, and is right before its word tells of it: else
// rows go straight to each rank. All ranks try, and all do alike.
Status PostedTransport::pass_gate(const BackendInit& init, uint64_t tag) {
  const Status ready = launched("loading the kernels", load_pulls());
  TW_RETURN_IF_FAILED(agree(*init.bootstrap, init.members, tag + kGateStage, init.deadline, kConnectingDevices, ready));
  bool passed = false;
  const Status tried = try_gate(init, &passed);
  std::vector<Parcel> all;
  const Status met = gather(*init.bootstrap, init.members, tag + kGateStage + 1,
                            {pack_result(tried).add(passed).take(), {}}, init.deadline, kConnectingDevices, &all);
  TW_RETURN_IF_FAILED(tried);
  TW_RETURN_IF_FAILED(met);
  for (size_t rank = 0; rank < all.size(); ++rank) {
    Unpacker reader(all[rank].bytes);
    TW_RETURN_IF_FAILED(read_result(init.members[rank], reader));
    if (reader.get<bool>()) continue;
    if (crossing_ == twCrossPerHost) {
      return fail(twUnsupported,
                  "{} is per host, and rank {} does not see in time what the network writes to other devices of its "
                  "host",
                  Argument("config.crossing"), rank);
    }
    crosses_once_ = false;
  }
  return {};
}

// The network may need CUDA's calls of this process to bring what the kernel waits for, so nobody waits inside one.
Status PostedTransport::try_gate(const BackendInit& init, bool* passed) {
  constexpr uint64_t kMostBytes = 4096;  // of a trial
  constexpr std::chrono::nanoseconds kPatience{5'000'000'000};
  constexpr std::chrono::microseconds kNap{50};
  uint32_t wrong = 0;
  GateParams p{};
  p.net = network_->view();
  p.once = host_rows(0);
  p.words = {inbox_.number, inboxes_.words_at()};
  p.near_words = {inbox_.table, inboxes_.words_at()};
  p.me = init.context->me;
  p.ranks = map_.shape().ranks;
  p.bytes = std::min(kMostBytes, inboxes_.message / kGateTrials / sizeof(uint64_t) * sizeof(uint64_t));
  const auto left = std::max(init.deadline - std::chrono::steady_clock::now(), std::chrono::nanoseconds(0));
  p.timeout_ns = static_cast<uint64_t>(std::min(kPatience, left / 2).count());  // the ranks meet afterwards
  p.wrong = p.once.rows;                                                        // which counts nothing yet
  TW_RETURN_IF_FAILED(do_apart([&](cudaStream_t stream) {
    auto error = static_cast<cudaError_t>(launch_gate(p, stream));
    while (error == cudaSuccess && (error = cudaStreamQuery(stream)) == cudaErrorNotReady) {
      (void)cudaGetLastError();
      error = cudaSuccess;
      std::this_thread::sleep_for(kNap);
    }
    if (error == cudaSuccess) error = cudaMemcpyAsync(&wrong, p.wrong, sizeof wrong, cudaMemcpyDeviceToHost, stream);
    if (error == cudaSuccess) error = cudaMemsetAsync(p.wrong, 0, sizeof wrong, stream);
    return error;
  }));
  *passed = wrong == 0;
  return {};
}

}  // namespace tw::cuda
