// WindowMap: the byte map of a window. It takes a Shape and gives offsets from the window's begin. It is written once,
// for the host and for devices; every offset that anyone uses comes from here.
//
//   header        waiters, one abort signal per writer
//   channel 0     signals: bank 0, bank 1, each one 64-byte line per source: {signal, note, rows signal}
//                 bank 0, bank 1: dispatched rows, or the inbox of combined rows; behind each the unpacked rows of a
//                 dispatch whose rows all come as packets: no peer writes there          (devices)
//                 chunk signals: bank 0, bank 1, per source one for every chunk of a combine   (devices)
//                 packets: bank 0, bank 1, per source the LL128 packets of its rows, and behind
//                 these the packets of the metadata of its Simple rows                        (devices)
//                 loads: in four banks, by dispatch, per source what was chosen         (groups that count)
//   channel 1 ...
//   leases        rows of dispatches that outlive their step                            (high throughput)
//   weights       of experts, which peers read: no step writes there                      (maps that move)
//   channels of a group that has grown, once for each time: its banks, chunk signals and packets
//
// Growing moves no byte: what a map has of its own (banks, chunk signals, packets) is appended, and what outlives steps
// (header, signals, loads, leases, weights) stays at the places of the first map. So steps count on in the same
// signals, and calls of earlier maps, as graphs replay them, find everything where it was.
//
// Groups that share a window (an arena, core/arena.h) have maps of their own over the same channels: `share`. Each kind
// of region is where the arena's is, bank by bank, so a step writes nothing that lies in the other bank of any map
// (S2), and no place is a signal or a packet's flag in one map and data in another.
//
// One step at a time uses a bank (S1, S2), and a step is a dispatch or a combine. So rows and inbox share a bank's
// bytes: a bank is as large as the larger of the two, not as both together. An inbox that would be larger than the rows
// may have room for some of the tokens only; a combine then takes several parts, one after the other in the same bank.
//
// Rows that come as packets lie where their receiver puts them. Where all of a dispatch do, that is behind the bank, so
// experts may work in place there and a combine may read them as long as it likes: no peer's step overwrites them (S3).
//
// S10: where channels, signals and banks begin depends on the Shape alone. Inside a bank, places may depend on the
// bound of the step, since nobody reads a bank under another bound than its writers'. If that is broken, the next
// call's rows lie across rows that a slow rank still reads; if two ranks have other maps, every offset is wrong.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "layout/ll128.h"
#include "layout/shape.h"

namespace tw {

inline constexpr uint64_t kSignalStride = 64;  // a cache line for each signal: they have different writers
inline constexpr uint64_t kNoteOffset = 8;
inline constexpr uint64_t kRowsOffset = 16;
inline constexpr uint64_t kRegionAlignment = 256;
inline constexpr uint64_t kPageAlignment = 4096;
inline constexpr uint64_t kGrowthAlignment = 2u << 20;  // pieces by which devices map memory

// Bytes of what has a place of its own in a channel: the first four of one bank.
struct Room {
  uint64_t bank = 0;
  uint64_t unpacked = 0;
  uint64_t chunk_signals = 0;
  uint64_t packets = 0;  // those of metadata too
  uint64_t loads = 0;    // in all their banks

  constexpr bool holds(const Room& other) const {
    return bank >= other.bank && unpacked >= other.unpacked && chunk_signals >= other.chunk_signals &&
           packets >= other.packets;
  }
};

class WindowMap {
 public:
  WindowMap() = default;

  // Makes the map of a Shape. False if a size passes 64 bits (or half of it, so that sums of two never wrap). `least`:
  // what a channel shall have room for at least.
  static constexpr bool make(const Shape& shape, WindowMap* map, const Room& least = {}) {
    Checked c;
    map->shape_ = shape;
    const uint64_t partials = inbox_rows(shape);  // neither factor has more than 31 bits
    const uint64_t rows = std::max(bank_rows(shape), c.mul(shape.ranks, shape.low_latency_tokens));
    uint64_t own = 0;
    for (int q = 0; q < shape.payloads; ++q) own = c.add(own, shape.payload_bytes[q]);
    // The part of each payload begins at a multiple of kRegionAlignment, and a call may have any payloads.
    const auto payloads = [&](uint64_t of) {
      return c.add(c.mul(of, std::max(own, shape.dispatch_room)), kMaxPayloads * kRegionAlignment);
    };
    const uint64_t dispatch = c.add(payloads(rows), c.mul(rows, meta_bytes(shape.top_k)));
    const uint64_t inbox = c.mul(partials, shape.most_combine_bytes());
    const uint64_t counts = shape.recv_rows > 0 ? c.mul(shape.ranks, counts_bytes(shape)) : 0;
    map->unpacked_at_ = c.align(std::max({dispatch, inbox, counts, least.bank}), kPageAlignment);
    map->packet_places_ = std::max(shape.packet_tokens, shape.low_latency_packets);
    const uint64_t unpacked = map->packet_places_ > 0 ? payloads(c.mul(shape.ranks, map->packet_places_)) : 0;
    map->bank_bytes_ = c.add(map->unpacked_at_, c.align(std::max(unpacked, least.unpacked), kPageAlignment));
    map->banks_at_ = c.align(2 * kSignalStride * shape.ranks, kPageAlignment);
    map->chunks_at_ = c.add(map->banks_at_, c.mul(2, map->bank_bytes_));
    const bool larger = shape.combine_room > shape.combine_bytes;
    const int32_t least_rows =
        larger ? std::min(shape.chunk_rows, chunk_rows_of(shape.combine_room)) : shape.chunk_rows;
    map->chunks_ = least_rows > 0 ? (shape.max_tokens + least_rows - 1) / least_rows : 0;
    const uint64_t chunk_signals = c.mul(sizeof(uint64_t), c.mul(shape.ranks, map->chunks_));
    map->chunks_bytes_ = std::max(chunk_signals, least.chunk_signals);
    map->packets_at_ = c.align(c.add(map->chunks_at_, c.mul(2, map->chunks_bytes_)), kPageAlignment);
    map->packet_row_ = map->packet_places_ > 0 ? packet_row_bytes(shape) : 0;
    // A combine per expert has its packets by (token, k) of the owner.
    uint64_t packet_rows = c.mul(shape.ranks, map->packet_places_);
    if (shape.per_expert != 0) {
      packet_rows =
          std::max(packet_rows, c.mul(shape.top_k, std::min<uint64_t>(map->packet_places_, kMostChoicePackets)));
    }
    const uint64_t packets = c.mul(packet_rows, map->packet_row_);
    map->meta_packets_at_ = c.add(map->packets_at_, packets);
    map->meta_packet_row_ = map->packet_places_ > 0 ? meta_packet_bytes(shape) : 0;
    map->place_payloads();
    map->packets_bytes_ = std::max(c.add(packets, c.mul(rows, map->meta_packet_row_)), least.packets);
    map->loads_at_ = c.align(c.add(map->packets_at_, c.mul(2, map->packets_bytes_)), kRegionAlignment);
    map->channel_bytes_ = c.align(c.add(map->loads_at_, std::max(c.loads(shape), least.loads)), kPageAlignment);
    map->channels_at_ = map->first_at_ = c.align(kAbortAt + sizeof(uint64_t) * shape.ranks, kPageAlignment);
    map->first_bytes_ = map->channel_bytes_;
    map->leases_at_ = c.add(map->channels_at_, c.mul(shape.channels, map->channel_bytes_));
    map->weights_at_ = c.add(map->leases_at_, shape.lease_bytes);
    map->bytes_ = c.add(map->weights_at_, shape.weight_bytes);
    return !c.overflow;
  }

  // What a channel of this map has room for. Not to be asked of a map that shares or has grown.
  constexpr Room room() const {
    return {unpacked_at_, bank_bytes_ - unpacked_at_, chunks_bytes_, packets_bytes_, channel_bytes_ - loads_at_};
  }
  // Bytes of the load statistics of a group that counts, in a channel.
  static constexpr uint64_t loads_bytes(const Shape& shape) { return Checked().loads(shape); }

  // The map of this group over the channels of another's map, `arena`, which has room for it and as many ranks and
  // channels. `loads`: where its load statistics are, in those that the arena has room for.
  constexpr WindowMap share(const WindowMap& arena, uint64_t loads) const {
    WindowMap map = *this;
    map.bank_bytes_ = arena.bank_bytes_;
    map.unpacked_at_ = arena.unpacked_at_;
    map.banks_at_ = arena.banks_at_;
    map.chunks_at_ = arena.chunks_at_;
    map.chunks_bytes_ = arena.chunks_bytes_;
    map.packets_at_ = arena.packets_at_;
    map.meta_packets_at_ = arena.packets_at_ + (meta_packets_at_ - packets_at_);
    map.packets_bytes_ = arena.packets_bytes_;
    map.loads_at_ = arena.loads_at_ + loads;
    map.channel_bytes_ = arena.channel_bytes_;
    map.channels_at_ = arena.channels_at_;
    map.first_at_ = arena.first_at_;
    map.first_bytes_ = arena.first_bytes_;
    map.leases_at_ = arena.leases_at_;
    map.weights_at_ = arena.weights_at_;
    map.bytes_ = arena.bytes_;
    return map;
  }

  // Makes the map of this group with larger rows or more of them: a Shape that differs in nothing else. False as make.
  constexpr bool grow(const Shape& shape, WindowMap* map, const Room& least = {}) const {
    WindowMap grown;
    if (!make(shape, &grown, least)) return false;
    Checked c;
    grown.first_at_ = first_at_;
    grown.first_bytes_ = first_bytes_;
    grown.loads_at_ = loads_at_;
    grown.leases_at_ = leases_at_;
    grown.weights_at_ = weights_at_;
    grown.channels_at_ = c.align(bytes_, kGrowthAlignment);
    grown.bytes_ = c.add(grown.channels_at_, c.mul(shape.channels, grown.channel_bytes_));
    *map = grown;
    return !c.overflow;
  }
  // The map with its channels elsewhere: where no peer looks into the window, they need not lie behind the others.
  constexpr WindowMap with_channels_at(uint64_t at) const {
    WindowMap map = *this;
    map.channels_at_ = at;
    return map;
  }

  // The map of a dispatch whose rows consist of other payloads; they have room, most_dispatch_bytes, together. Only
  // what lies inside a bank moves. All ranks of the step have the same payloads (S10), which their notes say.
  constexpr WindowMap for_dispatch(int32_t payloads, const uint64_t* bytes) const {
    WindowMap map = *this;
    map.shape_.payloads = payloads;
    for (int q = 0; q < kMaxPayloads; ++q) map.shape_.payload_bytes[q] = q < payloads ? bytes[q] : 0;
    map.place_payloads();
    return map;
  }
  // The map of a combine of other rows; they have room, most_combine_bytes.
  constexpr WindowMap for_combine(uint64_t bytes) const {
    WindowMap map = *this;
    map.shape_.combine_bytes = bytes;
    if (shape_.chunk_rows > 0) map.shape_.chunk_rows = chunk_rows_of(bytes);
    return map;
  }

  // The map of a low-latency call in a group of both modes: rows lie in slots, as many as there is room for.
  constexpr WindowMap for_low_latency() const {
    WindowMap map = *this;
    map.shape_.recv_rows = 0;
    map.shape_.max_tokens = shape_.low_latency_tokens;
    map.shape_.packet_tokens = shape_.low_latency_packets;
    map.shape_.low_latency_tokens = map.shape_.low_latency_packets = 0;
    map.shape_.inbox_tokens = 0;  // a combine of so few is one part
    map.place_payloads();
    return map;
  }

  // The map of a dispatch whose rows all come as packets, as those of up to packet_tokens tokens of each rank do: its
  // payloads lie behind the bank, where their receiver alone writes. Made of the map of the call's rows.
  constexpr WindowMap unpacked() const {
    WindowMap map = *this;
    map.place_payloads(unpacked_at_, static_cast<uint64_t>(shape_.ranks) * packet_places_);
    map.meta_at_ = meta_at_;
    return map;
  }

  // How many rows of each payload that map has room for.
  constexpr int64_t unpacked_rows() const {
    return static_cast<int64_t>(shape_.ranks) * static_cast<int64_t>(packet_places_);
  }

  constexpr const Shape& shape() const { return shape_; }
  constexpr uint64_t bytes() const { return bytes_; }
  constexpr uint64_t channel_bytes() const { return channel_bytes_; }

  // Where leases begin, and weights behind them: the last parts of a window that has not grown.
  constexpr uint64_t leases() const { return leases_at_; }
  constexpr uint64_t weights() const { return weights_at_; }

  // Where this map's channels begin, and the bytes of all of them.
  constexpr uint64_t channels() const { return channels_at_; }
  constexpr uint64_t channels_bytes() const { return channel_bytes_ * static_cast<uint64_t>(shape_.channels); }
  // Whether an offset lies in a channel's part, or in any channel's. (A difference that wraps is large.)
  constexpr bool in_channel(int channel, uint64_t offset) const {
    return offset - channel_at(channel) < channel_bytes_;
  }
  constexpr bool in_channels(uint64_t offset) const { return offset - channels_at_ < channels_bytes(); }
  // Whether an offset lies in some channel's part where this rank alone writes: among unpacked rows.
  constexpr bool in_unpacked(uint64_t offset) const {
    if (!in_channels(offset)) return false;
    const uint64_t at = (offset - channels_at_) % channel_bytes_ - banks_at_;
    return at < 2 * bank_bytes_ && at % bank_bytes_ >= unpacked_at_;
  }

  // uint32: how many threads of this rank sleep on a signal.
  static constexpr uint64_t waiters() { return 0; }
  // uint64, written by `writer` only: why it gave the group up, 0 if it did not.
  static constexpr uint64_t abort_signal(int writer) { return kAbortAt + sizeof(uint64_t) * writer; }

  // uint64, written by `source` only: see exchange/signals.h. The step half is kStepHalf bytes into it.
  constexpr uint64_t signal(int channel, int bank, int source) const {
    return first_at(channel) + kSignalStride * (static_cast<uint64_t>(bank) * shape_.ranks + source);
  }
  // uint64, written by `source` before its signal or with it: the bound of the step, and on devices more (PROTOCOL.md).
  constexpr uint64_t note(int channel, int bank, int source) const {
    return signal(channel, bank, source) + kNoteOffset;
  }

  // A received row of payload q: (source, slot) of [N, b], or in high throughput one of all that come. Rows follow each
  // other without gaps, so that the region is a tensor.
  constexpr uint64_t payload_row(int channel, int bank, int q, uint64_t row) const {
    return bank_at(channel, bank) + payload_at_[q] + row * shape_.payload_bytes[q];
  }
  constexpr uint64_t meta_row(int channel, int bank, uint64_t row) const {
    return bank_at(channel, bank) + meta_at_ + row * meta_bytes(shape_.top_k);
  }
  // Slot p of a source, in a step of bound b: its payload q, and its metadata.
  constexpr uint64_t payload(int channel, int bank, int q, int source, int p, int bound) const {
    return payload_row(channel, bank, q, row(source, p, bound));
  }
  constexpr uint64_t meta(int channel, int bank, int source, int p, int bound) const {
    return meta_row(channel, bank, row(source, p, bound));
  }
  // What a source tells in an exchange of counts: int32 [N] rows that it sends to each rank, then [most_local_experts]
  // rows for each expert of this rank. In groups with leases, at receive_offsets_begin, uint64 [payloads] follow: the
  // receive offsets, where rows for the source are to land in its window; 0: in the bank.
  constexpr uint64_t counts(int channel, int bank, int source) const {
    return bank_at(channel, bank) + source * counts_bytes(shape_);
  }
  static constexpr uint64_t counts_bytes(const Shape& shape) {
    const uint64_t told = sizeof(int32_t) * (static_cast<uint64_t>(shape.ranks) + shape.most_local_experts);
    return shape.leases() ? receive_offsets_begin(shape) + sizeof(uint64_t) * static_cast<uint64_t>(shape.payloads)
                          : told;
  }
  static constexpr uint64_t receive_offsets_begin(const Shape& shape) {
    return (sizeof(int32_t) * (static_cast<uint64_t>(shape.ranks) + shape.most_local_experts) + 7) / 8 * 8;
  }

  // uint64, the step: rows chunk * chunk_rows and on of a source are in the inbox.
  constexpr uint64_t chunk_signal(int channel, int bank, int source, int chunk) const {
    const uint64_t of_source = static_cast<uint64_t>(source) * chunks_;
    return channel_at(channel) + chunks_at_ + chunks_bytes_ * bank + sizeof(uint64_t) * (of_source + chunk);
  }
  // Packets of the p-th row of a source that travels as LL128 packets, p < packet_tokens, for calls of all kinds alike.
  constexpr uint64_t packet(int channel, int bank, int source, int p) const {
    const uint64_t of_source = static_cast<uint64_t>(source) * packet_places_;
    return channel_at(channel) + packets_at_ + packets_bytes_ * bank + (of_source + p) * packet_row_;
  }
  // Packets of the metadata of a received Simple row (numbered as for payload_row).
  constexpr uint64_t meta_packet(int channel, int bank, uint64_t row) const {
    return channel_at(channel) + meta_packets_at_ + packets_bytes_ * bank + row * meta_packet_row_;
  }
  // uint64 [1 + E], [2 + E] where maps move: what a source tells in a dispatch (exchange/loads.h). `bank`: on the CPU
  // the step's; on devices, which take them later, the number of the dispatch on its channel, mod 4.
  static constexpr int kLoadsBanks = 4;
  constexpr uint64_t loads(int channel, int bank, int source) const {
    const uint64_t row = static_cast<uint64_t>(bank) * shape_.ranks + source;
    return first_at(channel) + loads_at_ + sizeof(uint64_t) * row * loads_words(shape_);
  }
  static constexpr uint64_t loads_words(const Shape& shape) {
    return 1 + static_cast<uint64_t>(shape.choices()) + static_cast<uint64_t>(shape.moves);
  }
  constexpr uint64_t meta_packet_row() const { return meta_packet_row_; }
  // Bytes of the packets of all sources in a bank, without those of metadata.
  constexpr uint64_t packet_bytes() const { return meta_packets_at_ - packets_at_; }
  // Offsets from a bank's begin: where a payload's rows and the metadata begin.
  constexpr uint64_t payload_begin(int q) const { return payload_at_[q]; }
  constexpr uint64_t meta_begin() const { return meta_at_; }
  constexpr uint64_t packet_row() const { return packet_row_; }
  // Bytes from one source's packets to the next's.
  constexpr uint64_t packet_source() const { return packet_places_ * packet_row_; }
  // A whole bank: rows or inbox, without unpacked rows; layout/collective_map.h has the places of gathers and reduces
  // in it.
  constexpr uint64_t bank(int channel, int bank) const { return bank_at(channel, bank); }
  constexpr uint64_t bank_bytes() const { return unpacked_at_; }

  // With staged transport: place of the partial of the row in slot p of a source, in a step of bound b.
  constexpr uint64_t inbox_slot(int channel, int bank, int source, int p, int bound) const {
    return bank_at(channel, bank) + row(source, p, bound) * shape_.combine_bytes;
  }
  // Place of the position-th rank's partial of a token, counted from the first of the part that is combined.
  constexpr uint64_t inbox(int channel, int bank, int token, int position) const {
    return bank_at(channel, bank) + (static_cast<uint64_t>(token) * shape_.fan_out() + position) * shape_.combine_bytes;
  }

  // The same for the row of a token's k-th choice, where rows return per expert.
  constexpr uint64_t choice_slot(int channel, int bank, int source, int p, int bound, int k) const {
    return bank_at(channel, bank) + (row(source, p, bound) * shape_.top_k + k) * shape_.combine_bytes;
  }
  constexpr uint64_t choice_inbox(int channel, int bank, int token, int k) const {
    return bank_at(channel, bank) + (static_cast<uint64_t>(token) * shape_.top_k + k) * shape_.combine_bytes;
  }
  // Packets of the row of a token's k-th choice, token < packet_tokens and < kMostChoicePackets. One rank alone writes
  // them in a step.
  constexpr uint64_t choice_packet(int channel, int bank, int token, int k) const {
    return channel_at(channel) + packets_at_ + packets_bytes_ * bank +
           (static_cast<uint64_t>(token) * shape_.top_k + k) * packet_row_;
  }

  // Values of choices that return beside partials lie behind the whole inbox, choice_bytes for each partial, in the
  // same order: slot_values and inbox_values are to inbox_slot and inbox what their names say. A bank has room for them
  // where a partial and its values have (most_combine_bytes): aligning their begin takes at most 2 bytes, and a bank
  // whose end is that close to it does not end at a whole page.
  constexpr uint64_t slot_values(int channel, int bank, int source, int p, int bound) const {
    return bank_at(channel, bank) + values_begin() + row(source, p, bound) * choice_bytes(shape_.top_k);
  }
  constexpr uint64_t inbox_values(int channel, int bank, int token, int position) const {
    const uint64_t place = static_cast<uint64_t>(token) * shape_.fan_out() + position;
    return bank_at(channel, bank) + values_begin() + place * choice_bytes(shape_.top_k);
  }
  // Offset from a bank's begin: where those values begin.
  constexpr uint64_t values_begin() const {
    return (inbox_rows(shape_) * shape_.combine_bytes + sizeof(float) - 1) / sizeof(float) * sizeof(float);
  }

 private:
  struct Checked {
    bool overflow = false;
    constexpr uint64_t mul(uint64_t a, uint64_t b) {
      if (a != 0 && b > kLargest / a) overflow = true;
      return overflow ? 0 : a * b;
    }
    constexpr uint64_t add(uint64_t a, uint64_t b) {
      if (a + b > kLargest) overflow = true;
      return overflow ? 0 : a + b;
    }
    constexpr uint64_t align(uint64_t a, uint64_t to) { return add(a, to - 1) / to * to; }
    constexpr uint64_t loads(const Shape& shape) {
      if (shape.counts_loads == 0) return 0;
      return align(mul(kLoadsBanks, mul(sizeof(uint64_t), mul(shape.ranks, loads_words(shape)))), kRegionAlignment);
    }
    static constexpr uint64_t kLargest = UINT64_MAX / 2;
  };

  static constexpr uint64_t kAbortAt = 64;

  // How many rows a rank may receive in a step by this Shape. With staged transport the blocks of all sources lie in a
  // bank before their rows come together.
  static constexpr uint64_t bank_rows(const Shape& shape) {
    const uint64_t slots = static_cast<uint64_t>(shape.ranks) * static_cast<uint64_t>(shape.max_tokens);
    if (shape.recv_rows == 0) return slots;
    return shape.staged != 0 ? std::max<uint64_t>(slots, shape.recv_rows) : shape.recv_rows;
  }

  // Says where in a bank each payload's rows and the metadata begin: `rows` rows of each from `at` on. Sums fit: make
  // has checked larger ones.
  constexpr void place_payloads(uint64_t at, uint64_t rows) {
    for (int q = 0; q < shape_.payloads; ++q) {
      payload_at_[q] = at;
      at = (at + rows * shape_.payload_bytes[q] + kRegionAlignment - 1) / kRegionAlignment * kRegionAlignment;
    }
    meta_at_ = at;
  }
  constexpr void place_payloads() { place_payloads(0, bank_rows(shape_)); }

  // How many rows an inbox has places for.
  static constexpr uint64_t inbox_rows(const Shape& shape) {
    if (shape.staged == 0) {
      return static_cast<uint64_t>(shape.part_tokens()) * static_cast<uint64_t>(shape.returning());
    }
    const uint64_t slots = static_cast<uint64_t>(shape.ranks) * static_cast<uint64_t>(shape.max_tokens);
    return shape.per_expert != 0 ? slots * static_cast<uint64_t>(shape.top_k) : slots;
  }
  static constexpr uint64_t row(int source, int p, int bound) { return static_cast<uint64_t>(source) * bound + p; }
  constexpr uint64_t channel_at(int channel) const { return channels_at_ + channel_bytes_ * channel; }
  constexpr uint64_t first_at(int channel) const { return first_at_ + first_bytes_ * channel; }
  constexpr uint64_t bank_at(int channel, int bank) const {
    return channel_at(channel) + banks_at_ + bank_bytes_ * bank;
  }

  Shape shape_;
  uint64_t unpacked_at_ = 0;                // where unpacked rows begin behind a bank: the bank's bytes
  uint64_t payload_at_[kMaxPayloads] = {};  // in a bank
  uint64_t meta_at_ = 0;                    // in a bank
  uint64_t bank_bytes_ = 0;                 // with unpacked rows
  uint64_t banks_at_ = 0;                   // in a channel
  uint64_t chunks_at_ = 0;                  // in a channel
  uint64_t chunks_bytes_ = 0;               // of a bank's chunk signals
  uint64_t packets_at_ = 0;                 // in a channel
  uint64_t packets_bytes_ = 0;              // of a bank's packets
  uint64_t meta_packets_at_ = 0;
  uint64_t meta_packet_row_ = 0;
  uint64_t loads_at_ = 0;       // in a channel of the first map
  uint64_t chunks_ = 0;         // chunk signals of a source in a bank
  uint64_t packet_row_ = 0;     // bytes of all packets of a row
  uint64_t packet_places_ = 0;  // rows of a source that there are packets for
  uint64_t channel_bytes_ = 0;
  uint64_t channels_at_ = 0;
  uint64_t first_at_ = 0;     // channels of the first map,
  uint64_t first_bytes_ = 0;  // and the bytes of one
  uint64_t leases_at_ = 0;
  uint64_t weights_at_ = 0;
  uint64_t bytes_ = 0;
};

}  // namespace tw
