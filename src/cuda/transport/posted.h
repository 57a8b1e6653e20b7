// Staged transport to devices of other hosts: kernels post a step's blocks (launch/posts.h), straight from this rank's
// outgoing memory into its peers' windows; to ranks of this host by stores, to others over a network (network.h). There
// are no collectives, no host waits, and who is late is seen by the kernel that waits for it, as where windows are
// mapped.
//
// Outgoing memory has two banks, as the network reads it later than the kernel that posts (T3, T4): that of a step is
// free when the step behind has ended, as each rank's signal of that one says that it has all of this one. So has the
// memory in which rows of an exact layout arrive, as a peer may be a step ahead.
//
// Rows of a dispatch may go to each host once, into an inbox from which the ranks there copy them (layout/inbox_map.h):
// where blocks are so large that it is faster, and each GPU sees what the network writes to another of its host. That
// the driver is asked for (GPUDirect RDMA's order of writes), and it is tried when a group is made.
//
// What breaks if this changes: T3, T4, and S1 and S2, which hold here as where windows are mapped: a rank's signal of a
// step is posted behind what it has read of the bank that a peer writes next.
#pragma once

#include "core/near.h"
#include "cuda/launch/posts.h"
#include "cuda/transport/network.h"
#include "cuda/transport/routes.h"
#include "cuda/transport/staged.h"
#include "layout/inbox_map.h"
#include "layout/posts_map.h"

namespace tw::cuda {

class PostedTransport final : public StagedTransport {
 public:
  // Makes this rank's window, zero but for its signals, maps those of this host's ranks, and connects the network.
  // Collective; uses the tags from `tag` to `tag + kTags - 1`.
  static constexpr uint64_t kTags = 24;
  static Status create(const BackendInit& init, uint64_t tag, DeviceWindows* windows,
                       std::unique_ptr<StagedTransport>* made);
  ~PostedTransport() override;
  PostedTransport(const PostedTransport&) = delete;
  PostedTransport& operator=(const PostedTransport&) = delete;

  void place(StepPlace at, const WindowMap& map, GroupView* view) const override;
  Status make_arrivals(const BackendInit& init) override;
  const std::byte* receive_offset(StepPlace at) const override {
    return arrivals_.data() + posts_.arrivals_at(at.channel) + posts_.arrival * static_cast<uint64_t>(at.bank());
  }

  Status begin(const GroupView& view, const MovedStep& step) override;
  Status start(const GroupView& view, const MovedStep& step, const Blocks& blocks, bool at_once) override;
  Status join(const GroupView& view, const MovedStep& step, const Blocks& blocks) override;
  bool folds(const Domains& domains, const Blocks& blocks) const override;
  bool over_carrier() const override { return false; }
  Status prepare_growth(const BackendInit& init, WindowMap* grown) override;
  void end_growth(bool grown, bool certain) override;
  Status failure() override { return network_ == nullptr ? Status{} : network_->failure(); }
  void abort() override;

 private:
  // Memory of the network's: this rank's, and that of this host's ranks as it is mapped here.
  struct Memory {
    DeviceWindows near;  // by rank of this host; of what goes out this rank's alone, unless there are folds
    int me = 0;          // among these
    int number = -1;
    std::byte** table = nullptr;  // [N] in device memory: where it begins at each rank of this host, NULL elsewhere
    std::byte* data() const {
      const auto at = static_cast<size_t>(me);
      return at < near.by_rank.size() && near.by_rank[at] != nullptr ? near.by_rank[at]->data() : nullptr;
    }
  };
  // A part of the window, which is one of the network's memories.
  struct Piece {
    uint64_t begin;
    uint64_t bytes;
    int number;
  };

  PostedTransport(const BackendInit& init, const Topology& topology);
  Status make(const BackendInit& init, uint64_t tag, const Status& mapped);
  Status share(const Near& near, uint64_t tag, const Status& ready, uint64_t bytes, Memory* memory);
  Status make_outgoing(const BackendInit& init, const Near& near, uint64_t tag, const Status& ready, uint64_t bytes,
                       Memory* memory);
  Status tabulate(const Near& near, Memory* memory);
  Status add(const BackendInit& init, uint64_t tag, const Memory& memory, uint64_t begin, uint64_t bytes, int* number);

  NetPlace in_window(uint64_t offset) const;
  PostSignals signals_of(int channel) const;
  void add_regions(const WindowMap& map, int channel, const Blocks& blocks, PostParams* p) const;
  PostParams params_of(const GroupView& view, const MovedStep& step, const Blocks& blocks) const;
  HostRows host_rows(int channel) const;
  bool are_worth_it(uint64_t bytes, uint64_t least) const { return crossing_ == twCrossPerHost || bytes >= least; }
  void place_messages(const Blocks& blocks, PostParams* p) const;
  FoldParams place_folds(const PostParams& post, const MovedStep& step, const Blocks& blocks) const;
  Status post_folds(const PostParams& post, const MovedStep& step, const Blocks& blocks) const;
  Status pass_gate(const BackendInit& init, uint64_t tag);
  Status try_gate(const BackendInit& init, bool* passed);

  WindowMap map_;  // the arena's: its groups may end before this does
  PostsMap posts_;
  InboxMap inboxes_;  // of messages; none: all that travels goes straight
  WindowMap next_map_;
  PostsMap next_posts_;
  InboxMap next_inboxes_;
  const twCrossing_t crossing_;
  const InboxUses uses_;
  bool crosses_once_;  // rows do, where that is faster or asked for
  HostRoutes routes_;
  const int device_;
  const Topology topology_;
  Memory window_;
  Memory out_;
  Memory arrivals_;  // no data: no group has needed it yet
  Memory inbox_;     // of messages, if inboxes_ has any
  Memory next_out_;
  Memory next_arrivals_;
  Memory next_inbox_;
  std::vector<Memory> former_;  // such memory of smaller maps, which the network knows until it ends
  std::vector<Piece> pieces_;
  uint64_t* told_ = nullptr;     // [channels, 2, N]
  uint32_t* arrived_ = nullptr;  // [channels, N]
  std::vector<void*> tables_;
  std::unique_ptr<Network> network_;  // ends before the memory that it knows
};

}  // namespace tw::cuda
