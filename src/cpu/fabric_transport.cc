// Sending and taking messages between hosts (cpu/fabric_transport.h). fabric_creation.cc makes the transport, and
// fabric_waiting.cc ends waits that do not end in data.
#include "cpu/fabric_transport.h"

#include <algorithm>
#include <cstring>

namespace tw::cpu {
namespace {

// A message goes in chunks of so many bytes at least, so that it travels while the rest of it is written. A step then
// posts at most 26 operations to a peer, its block with them, and two steps of each of 64 lanes fewer than the 4096
// that an engine takes (T7).
constexpr uint64_t kChunk = uint64_t{256} << 10;
constexpr uint64_t kMostChunks = 24;

}  // namespace

// ------------------------------------------------------------------------------------------------------------ sending

void FabricTransport::begin(StepPlace at, const Outline& outline, bool send_only) {
  CpuTransport::begin(at, outline, send_only);
  at_ = at;
  area_ = outline.area;
  if (area_ == Area::kFolds) folding_ = *outline.folding;
  told_ = 0;
  staged_ = 0;
  run_ = {};
  if (engine_ == nullptr) return;
  RowsInPlace& partials = in_place_[index(at, 0, 1)];
  if (outline.map != nullptr) {
    partials.begin(*outline.map, at.channel, at.bank());
  } else {
    partials.end();
  }
  const int mine = topology_.host[me_];
  for (int host = 0, n = 0; host < topology_.hosts(); ++host) {
    shipped_[host] = 0;
    published_[host] = 0;
    if (host != mine && area_ != Area::kStraight)
      messages_[host].begin(staging() + static_cast<uint64_t>(n++) * message_room(), message_room());
  }
}

void FabricTransport::put(int peer, uint64_t offset, const void* source, size_t n) {
  if (is_near(peer)) return CpuTransport::put(peer, offset, source, n);
  if (area_ == Area::kStraight) return put_straight(peer, offset, source, n);
  if (area_ == Area::kFolds) return put_to_fold(peer, offset, source, n);
  message_to(peer).put(topology_.rail[peer], offset, source, n);
  ship(topology_.host[peer], message_to(peer).sealed(), false);
}

void FabricTransport::put_row(int peer, uint64_t offset, const void* source, size_t n) {
  if (is_near(peer)) return CpuTransport::put(peer, offset, source, n);
  if (area_ == Area::kStraight) return put_straight(peer, offset, source, n);
  message_to(peer).put_row(topology_.rail[peer], offset, source, n);
  ship(topology_.host[peer], message_to(peer).sealed(), false);
}

void FabricTransport::flush() {
  CpuTransport::flush();
  if (engine_ == nullptr) return;
  ship_run();
  for (int host = 0; host < topology_.hosts(); ++host) {
    if (host != topology_.host[me_] && area_ != Area::kStraight) ship(host, messages_[host].finish(), true);
  }
}

// Posts a host's message up to there, if that is a chunk, or `all` of it.
void FabricTransport::ship(int host, uint64_t until, bool all) {
  const uint64_t bytes = until - shipped_[host];
  if (bytes == 0 || (!all && bytes < std::max(kChunk, message_room() / kMostChunks))) return;
  const int peer = topology_.rail_peer(me_, host);
  const int list = topology_.list(me_, host);
  const uint64_t from = static_cast<uint64_t>(messages_[host].begins() - lists_.of[me_]->data()) + shipped_[host];
  net::Place to{lists_.number, shipped_[host]};
  if (area_ == Area::kReturns && hosts_map_.in_bank != 0) {
    to = place_in_window(map_.bank(at_.channel, at_.bank()) + hosts_map_.returns_at(at_.channel, at_.bank(), list) +
                         shipped_[host]);
  } else {
    to.offset += area_ == Area::kReturns ? hosts_map_.returns_at(at_.channel, at_.bank(), list)
                                         : hosts_map_.inbox_at(at_.channel, at_.bank(), list);
  }
  post(peer, {{lists_.number, from}, to, bytes});
  shipped_[host] = until;
}

void FabricTransport::put_straight(int peer, uint64_t offset, const void* source, size_t n) {
  if (n == 0) return;
  if (run_.peer != peer || run_.to + run_.bytes != offset) {
    ship_run();
    run_ = {peer, staged_, offset, 0};
  }
  if (n > hosts_map_.straight_room() - staged_) {
    engine_->give_up(peer, fail(twInternalError, "a step puts more to other hosts than there is staging for"));
    return;
  }
  std::memcpy(staging() + staged_, source, n);
  staged_ += n;
  run_.bytes += n;
}

void FabricTransport::ship_run() {
  if (run_.bytes > 0) {
    const uint64_t from = static_cast<uint64_t>(staging() - lists_.of[me_]->data()) + run_.from;
    post(run_.peer, {{lists_.number, from}, place_in_window(run_.to), run_.bytes});
  }
  run_ = {};
}

net::Place FabricTransport::place_in_window(uint64_t offset) const {
  const auto piece = std::ranges::find_if(pieces_, [&](const Piece& p) { return offset - p.begin < p.bytes; });
  if (piece == pieces_.end()) return {-1, offset};  // which the engine refuses
  return {piece->number, offset - piece->begin};
}

// What the engine does not take, because the peer is gone, the wait finds out. It never has too much (T7).
void FabricTransport::post(int peer, const net::Put& put, const net::Word* word) {
  const net::Posted posted = word == nullptr ? engine_->put(peer, put) : engine_->put(peer, put, *word);
  if (posted == net::Posted::kTaken || posted == net::Posted::kGone) return;
  engine_->give_up(peer, fail(twInternalError, "the engine between hosts does not take a put to rank {}: {}",
                              members_[peer], posted == net::Posted::kFull ? "too many" : "no such place"));
}

void FabricTransport::publish(int peer, uint64_t offset, Signal signal, uint64_t note) {
  if (is_near(peer)) {
    CpuTransport::publish(peer, offset, signal, note);
  } else {
    const int host = topology_.host[peer];
    uint64_t& rows = rows_told_[index(at_, peer, ranks())];
    if (has_rows_word(peer)) rows += kOneRowsWord;
    if (area_ == Area::kStraight) {
      const net::Word word{{words_.number, hosts_map_.rows_word(at_.channel, at_.bank(), me_)}, kOneRowsWord};
      post(peer, {{words_.number, 0}, {words_.number, 0}, 0}, &word);
    }
    const Block::Entry entry{note, rows, signal.n};
    std::byte* const block = words_.of[me_]->data() + hosts_map_.staged_block(at_.channel, at_.bank(), host);
    std::memcpy(block + sizeof(Block) + sizeof entry * static_cast<size_t>(topology_.rail[peer]), &entry, sizeof entry);
    if (++published_[host] == static_cast<int>(topology_.ranks[host].size())) tell_host(host, signal);
  }
  if (++told_ != ranks()) return;
  asking_->count();
  if (area_ == Area::kFolds) give_folds();
}

// Whether rows come to a rank of another host apart from this rank's messages: straight, or as folds of this rank's.
bool FabricTransport::has_rows_word(int peer) const {
  if (area_ == Area::kFolds) return inbound_[peer].mate == me_;
  return area_ == Area::kStraight;
}

// Posts the block and then, in the same operation, the word (T5, T8): the one place where words are posted (T6).
void FabricTransport::tell_host(int host, Signal signal) {
  const int peer = topology_.rail_peer(me_, host);
  const int list = topology_.list(me_, host);
  const auto entries = static_cast<uint32_t>(topology_.ranks[host].size());
  if (area_ != Area::kStraight && messages_[host].overflowed()) {
    engine_->give_up(peer, fail(twInternalError, "a step puts more to other hosts than an inbox has room for"));
  }
  const bool has_message = area_ == Area::kInbox || area_ == Area::kReturns;
  const Block block{has_message ? messages_[host].bytes() : 0, static_cast<uint32_t>(area_), entries};
  const uint64_t staged = hosts_map_.staged_block(at_.channel, at_.bank(), host);
  std::memcpy(words_.of[me_]->data() + staged, &block, sizeof block);
  uint64_t& old = words_told_[index(at_, host, topology_.hosts())];
  const uint64_t told = pack({signal.step, signal.mode, 0});
  const net::Word word{{words_.number, hosts_map_.word(at_.channel, at_.bank(), list)}, told - old};
  old = told;
  post(peer,
       {{words_.number, staged},
        {words_.number, hosts_map_.block(at_.channel, at_.bank(), list)},
        sizeof block + sizeof(Block::Entry) * entries},
       &word);
}

// ---------------------------------------------------------------------------------------------------------- receiving

// Whether a remote rank's step is here; if it has come just now, takes it.
bool FabricTransport::arrived(int source, StepPlace at) {
  if (has_signal(source, at)) return true;
  const Signal told = unpack(read_word(word_of(source, at)));
  return reached(told.step, at.step) && take(source, at, told);
}

// Copies what a word that has come tells of into this rank's window, and stores the signal there. False if rows are
// still on another way. A word that is reached and not equal was added twice (docs/PROTOCOL.md, "Words by add"): the
// signal that is stored then is that of another step, which the step finds.
bool FabricTransport::take(int source, StepPlace at, Signal told) {
  const auto store = [&](Signal signal, uint64_t note) {
    CpuTransport::publish(me_, signal_at(source, at), signal, note);
    return true;
  };
  if (told.step != at.step) return store(told, 0);
  const Inbound& from = inbound_[source];
  const std::byte* const at_block = words_.of[from.mate]->data() + hosts_map_.block(at.channel, at.bank(), from.list);
  Block block;
  Block::Entry entry;
  std::memcpy(&block, at_block, sizeof block);
  std::memcpy(&entry, at_block + sizeof block + sizeof entry * static_cast<size_t>(topology_.rail[me_]), sizeof entry);
  const uint64_t rows = read_word(rows_word_of(source, at));
  if (rows != entry.rows_word) {
    const bool late = static_cast<int64_t>(rows - entry.rows_word) < 0;
    return !late && store({at.step + 1, told.mode, 0}, 0);
  }
  const bool good = block.area <= static_cast<uint32_t>(Area::kFolds) && take_message(source, at, block);
  // More rows than any step has are found to be an error.
  return store({told.step, told.mode, good ? static_cast<uint32_t>(entry.n) : kMaxCount}, entry.note);
}

// Copies what is for this rank out of a source's message, but for partials, which stay in it (cpu/in_place.h). False if
// it is none.
bool FabricTransport::take_message(int source, StepPlace at, const Block& block) {
  const Inbound& from = inbound_[source];
  const auto area = static_cast<Area>(block.area);
  if (area == Area::kStraight) return true;
  const std::byte* message = lists_.of[from.mate]->data() + hosts_map_.inbox_at(at.channel, at.bank(), from.list);
  uint64_t bytes = block.bytes;
  uint64_t room = hosts_map_.inbox;
  if (area == Area::kFolds) {
    if (from.mate != me_) return true;  // that rank folds for others
    std::memcpy(&bytes, message, sizeof bytes);
    message += sizeof bytes;
    room -= sizeof bytes;
  } else if (area == Area::kReturns) {
    message = returned_rows(from.mate, from.list, at);
    room = hosts_map_.returns;
  }
  if (bytes > room) return false;
  RowsInPlace& partials = in_place_[index(at, 0, 1)];
  const auto copy_others = [&](uint64_t offset, const std::byte* data, uint64_t n) {
    const uint64_t stays = partials.take(offset, data, n);
    copy(local(offset + stays), data + stays, n - stays);
  };
  const bool good = deliver(message, bytes, topology_.rail[me_], map_.bytes(), copy_others);
  CpuTransport::flush();
  return good;
}

}  // namespace tw::cpu
