// How an item becomes operations of the network, and when it is over: peer_queue.h says why in this order.
#include "net/peer_queue.h"

#include <algorithm>
#include <utility>

namespace tw::net {

PeerQueue::PeerQueue(int peer, int rank, std::span<Operation> operations) : peer_(peer), rank_(rank) {
  for (Operation& operation : operations) {
    operation.queue = this;
    free_.push_back(&operation);
  }
}

void PeerQueue::take(const Put& put) { append({.put = put, .counts = true}); }

void PeerQueue::take(const Put& put, const Note& note) {
  append({.put = put, .counts = true, .has_note = true, .note = note});
}

void PeerQueue::take(const Note& note) { append({.put = {}, .has_note = true, .note = note}); }

void PeerQueue::append(Item item) {
  if (items_.empty()) moved_ = std::chrono::steady_clock::now();
  puts_taken_ += item.counts ? 1 : 0;
  items_.push_back(std::move(item));
}

bool PeerQueue::post(const Outlet& outlet) {
  bool any = false;
  while (waits()) {
    Item& item = items_[next_];
    int error = 0;
    Sent sent = Sent::kSent;
    if (item.sent < item.put.bytes) {
      sent = post_data(outlet, item, &error);
    } else if (item.has_note) {
      sent = post_note(outlet, item, &error);
    } else {
      item.posted = true;
    }
    if (sent == Sent::kFailed) {
      fail(tw::fail(twPeerDied, "libfabric's {} sends nothing more to rank {}: {}", outlet.endpoint->provider(), rank_,
                    outlet.endpoint->text_of(error)));
      return any;
    }
    if (sent == Sent::kAgain) return any;
    any = true;
    if (item.posted) {
      ++next_;
      retire();
    }
  }
  return any;
}

Sent PeerQueue::post_data(const Outlet& outlet, Item& item, int* error) {
  if (free_.empty()) return Sent::kAgain;
  const uint64_t bytes = std::min(outlet.chunk, item.put.bytes - item.sent);
  const Place from{item.put.from.window, item.put.from.offset + item.sent};
  const Extent& there = outlet.windows->extent(item.put.to.window, peer_);
  Operation* const operation = free_.back();
  const Sent sent = outlet.endpoint->write(peer_, outlet.windows->at(from), bytes, (*outlet.windows)[from.window].tag,
                                           there.base + item.put.to.offset + item.sent, there.key,
                                           !outlet.endpoint->ordered(), &operation->context, error);
  if (sent != Sent::kSent) return sent;
  begin(operation, item, true);
  item.sent += bytes;
  item.posted = item.sent == item.put.bytes && !item.has_note;
  return sent;
}

Sent PeerQueue::post_note(const Outlet& outlet, Item& item, int* error) {
  if (free_.empty()) return Sent::kAgain;
  if (!outlet.endpoint->ordered() && writes_flying_ > 0) return Sent::kAgain;  // S4: data have not arrived
  Operation* const operation = free_.back();
  operation->note = item.note;
  const Sent sent = outlet.endpoint->send(peer_, &operation->note, sizeof operation->note, outlet.notes_tag,
                                          &operation->context, error);
  if (sent != Sent::kSent) return sent;
  begin(operation, item, false);
  item.posted = true;
  return sent;
}

void PeerQueue::begin(Operation* operation, Item& item, bool writes) {
  free_.pop_back();
  operation->item = first_ + next_;
  operation->writes = writes;
  ++item.flying;
  writes_flying_ += writes ? 1 : 0;
}

void PeerQueue::end(Operation& operation) {
  free_.push_back(&operation);
  writes_flying_ -= operation.writes ? 1 : 0;
  --items_[operation.item - first_].flying;
  moved_ = std::chrono::steady_clock::now();
  retire();
}

void PeerQueue::retire() {
  while (!failed() && next_ > 0 && items_.front().flying == 0) {
    puts_done_ += items_.front().counts ? 1 : 0;
    items_.pop_front();
    ++first_;
    --next_;
  }
}

void PeerQueue::fail(Status why) {
  if (!failed()) failure_ = std::move(why);
}

}  // namespace tw::net
