// The exchange's Transport where ranks are on several hosts: shared memory among the ranks of a host (CpuTransport),
// and an engine (src/net) to those of others. What a step puts to ranks of another host becomes one message
// (cpu/host_message.h) into this rank's inbox at its rail peer there. All ranks of that host look at this rank's word
// in their mate's memory; when it has come, each copies what is for it into its own window, and stores the signal
// there. From there on all is as if a rank of the host had put it, so layouts, sums and bits are those of shared
// memory. Partials of a combine alone stay in their messages, where sums read them (cpu/in_place.h).
//
// T1 to T11 of docs/PROTOCOL.md are kept here: sends post everything (T1); a wait looks at a word and then takes what
// it tells, so before this rank publishes again (T2); two banks of everything (T3); the engine reads staging alone
// (T4); one function posts block and word, behind all rows, in every kind of step (T5, T6, T8); chunks bound what a
// step posts (T7); blame is asked for (T9, fabric_waiting.cc).
//
// What breaks if this changes: a word that is posted by another way than publish leaves peers waiting, or with an `old`
// that is not the word's.
#pragma once

#include <memory>
#include <vector>

#include "bootstrap/asking.h"
#include "cpu/fold_agent.h"
#include "cpu/host_message.h"
#include "cpu/in_place.h"
#include "cpu/transport.h"
#include "exchange/domains.h"
#include "layout/hosts_map.h"
#include "net/engine.h"

namespace tw::cpu {

class FabricTransport : public CpuTransport {
 public:
  // Collective among members.
  static Status make(const BackendInit& init, std::shared_ptr<FabricTransport>* made);
  ~FabricTransport();
  FabricTransport(const FabricTransport&) = delete;
  FabricTransport& operator=(const FabricTransport&) = delete;

  // Makes room for a group that is placed in the window of the one that this was made for. Collective; no step is under
  // way.
  Status place(const BackendInit& init);

  void begin(StepPlace at, const Outline& outline, bool send_only);
  void put(int peer, uint64_t offset, const void* source, size_t n);
  void put_row(int peer, uint64_t offset, const void* source, size_t n);
  void flush();
  void publish(int peer, uint64_t offset, Signal signal, uint64_t note);
  Waited wait(int peer, uint64_t offset, uint32_t step, TimePoint deadline);

  // Whether waits that are late ask who is to blame. One that only looks whether something has come does not.
  void ask(bool asks) { asks_ = asks; }

  // Whether partials of a group with these domains are folded before they go to other hosts (fabric_folding.cc).
  bool folds(const Domains& domains) const;

  // Until this rank's next step on the channel.
  const std::byte* returned(StepPlace at, uint64_t offset) const {
    const std::byte* const row = engine_ == nullptr ? nullptr : in_place_[index(at, 0, 1)].find(offset);
    return row != nullptr ? row : local(offset);
  }

  std::byte* window_of(int rank) const { return is_near(rank) ? CpuTransport::window_of(rank) : nullptr; }

  // Makes room for larger messages, and for the channels of a larger map. Collective; no step is under way.
  Status prepare_growth(const BackendInit& init, const WindowMap& grown);
  void end_growth(bool grown);

  void announce_abort(AbortSignal reason);
  AbortSignal find_abort();
  AbortSignal abort_of(int writer);

 private:
  // A rows word is a count in the half that a sleeper looks at.
  static constexpr uint64_t kOneRowsWord = uint64_t{1} << 32;

  enum Post : uint64_t { kAbortPost, kAskingPost };  // tags of posts, from tag_ on; asking has two

  // A window of the engine: bytes of this rank's memory, the same range on all ranks.
  struct Piece {
    uint64_t begin;
    uint64_t bytes;
    int number;
  };
  // Memory in which ranks of this host and the engine look.
  struct Shared {
    std::vector<std::shared_ptr<Mapping>> of;  // [N]; NULL for those of other hosts
    int number = -1;                           // of the engine's window
  };
  // Where a rank of another host puts its messages for this host, and where mates return what is folded for it.
  struct Inbound {
    int mate = -1;  // the rank in whose memory they lie
    int list = -1;
  };
  // A straight run: rows that follow each other in staging and at their place.
  struct Run {
    int peer = -1;
    uint64_t from = 0;  // in staging
    uint64_t to = 0;    // in the peer's window
    uint64_t bytes = 0;
  };

  FabricTransport(const BackendInit& init, Windows windows, const Topology& topology);

  // Creation (fabric_creation.cc).
  Status share(const BackendInit& init, uint64_t tag, const Status& ready, uint64_t bytes,
               const std::function<void(std::byte*)>& fill, Shared* shared) const;
  Status connect(const BackendInit& init);
  Status share_next_lists(const BackendInit& init, const Status& ready);

  bool is_near(int rank) const { return windows_[static_cast<size_t>(rank)] != nullptr; }
  uint64_t signal_at(int source, StepPlace at) const { return map_.signal(at.channel, at.bank(), source); }
  StepPlace place_of(uint64_t offset, int source, uint32_t step) const;
  // The n-th of a table by (channel, bank, n), of which a bank has `count`.
  static size_t index(StepPlace at, int n, int count) {
    return (static_cast<size_t>(at.channel) * HostsMap::kBanks + static_cast<size_t>(at.bank())) *
               static_cast<size_t>(count) +
           static_cast<size_t>(n);
  }

  // Sending.
  std::byte* staging() const {
    const bool beyond = area_ == Area::kStraight || (area_ == Area::kReturns && hosts_map_.tags != 0);
    return lists_.of[me_]->data() +
           (beyond ? hosts_map_.straight_at(at_.channel, at_.bank()) : hosts_map_.staging_at(at_.channel, at_.bank()));
  }
  uint64_t message_room() const { return area_ == Area::kReturns ? hosts_map_.returns : hosts_map_.inbox; }
  HostMessage& message_to(int peer) { return messages_[static_cast<size_t>(topology_.host[peer])]; }
  void ship(int host, uint64_t until, bool all);
  void put_straight(int peer, uint64_t offset, const void* source, size_t n);
  void ship_run();
  void tell_host(int host, Signal signal);
  bool has_rows_word(int peer) const;

  // Folding.
  void put_to_fold(int owner, uint64_t offset, const void* source, size_t n);
  std::byte* returned_rows(int mate, int list, StepPlace at) const;
  void give_folds();
  void send_folds(int owner, StepPlace at, const Folding& folding);
  net::Place place_in_window(uint64_t offset) const;
  void post(int peer, const net::Put& put, const net::Word* word = nullptr);

  // Receiving. word_of: the word of a rank of another host, in a mate's memory. rows_word_of: its rows word here.
  std::byte* word_of(int source, StepPlace at) const {
    const Inbound& from = inbound_[static_cast<size_t>(source)];
    return words_.of[from.mate]->data() + hosts_map_.word(at.channel, at.bank(), from.list);
  }
  std::byte* rows_word_of(int source, StepPlace at) const {
    return words_.of[me_]->data() + hosts_map_.rows_word(at.channel, at.bank(), source);
  }
  static uint64_t read_word(std::byte* word) {
    return std::atomic_ref(*reinterpret_cast<uint64_t*>(word)).load(std::memory_order_acquire);
  }
  bool arrived(int source, StepPlace at);
  bool take(int source, StepPlace at, Signal told);
  bool take_message(int source, StepPlace at, const Block& block);
  bool is_here(int rank, StepPlace at) { return is_near(rank) ? has_signal(rank, at) : arrived(rank, at); }
  bool has_signal(int rank, StepPlace at) const { return reached(load(signal_at(rank, at)).step, at.step); }
  bool look(int rank, StepPlace at, TimePoint deadline);
  void sleep_for(int rank, StepPlace at, TimePoint deadline);
  TimePoint given_up_at(StepPlace at);
  int find_dead(StepPlace at);
  Waited blame(int peer, StepPlace at, TimePoint now);

  const Topology topology_;
  WindowMap map_;       // the arena's, as it has grown
  WindowMap next_map_;  // that of a growth that is prepared
  const bool folds_;    // what the map below has room for
  HostsMap hosts_map_;
  HostsMap next_hosts_map_;
  const uint64_t tag_;
  int replicas_;
  Shared words_;
  Shared lists_;
  Shared next_lists_;
  std::vector<Shared> former_;         // which the engine still knows
  std::vector<Piece> pieces_;          // of the window
  std::vector<Inbound> inbound_;       // [N]
  std::vector<RowsInPlace> in_place_;  // [channels, banks] of the step that is under way there
  std::unique_ptr<Asking> asking_;
  bool asks_ = true;
  std::atomic<int64_t> looked_ = 0;  // when peers' posts were looked at last, by the clock's count

  // The step that is being sent.
  StepPlace at_{};
  Area area_ = Area::kInbox;
  std::vector<HostMessage> messages_;  // [hosts]
  std::vector<uint64_t> shipped_;      // [hosts] bytes of each message that are posted
  std::vector<int> published_;         // [hosts] ranks of each that have been published to
  int told_ = 0;                       // ranks that have been
  uint64_t staged_ = 0;                // bytes of staging that straight runs have taken
  Run run_;
  Folding folding_{};

  std::vector<uint64_t> words_told_;  // [channels, banks, hosts] what this rank's word at each rail peer is (T6)
  std::vector<uint64_t> rows_told_;   // [channels, banks, N] what its rows word at each rank is

  std::unique_ptr<net::Engine> engine_;  // ends before the memory that it knows. NULL where there is one host
  std::unique_ptr<FoldAgent> agent_;     // last: it posts to the engine. NULL: nothing is folded here
};

static_assert(Transport<FabricTransport>);

}  // namespace tw::cpu
