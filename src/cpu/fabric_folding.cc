// The combine by domain where domains are hosts (cpu/fabric_transport.h, cpu/fold_agent.h): partials for ranks of other
// hosts go to the mate that folds for them, and its agent puts the folds to their owners.
#include <cstring>

#include "cpu/fabric_transport.h"

namespace tw::cpu {

bool FabricTransport::folds(const Domains& domains) const {
  return agent_ != nullptr && topology_.divides_into(domains.size);
}

// A partial, or the values of choices beside it, for a rank of another host. Its place in that rank's inbox says which
// token's it is.
void FabricTransport::put_to_fold(int owner, uint64_t offset, const void* source, size_t n) {
  const Folded folded{at_, folding_, 0};
  const WindowMap& map = folding_.map;
  const Shape& shape = map.shape();
  const uint64_t rows = map.inbox(at_.channel, at_.bank(), 0, 0);
  const uint64_t values = map.inbox_values(at_.channel, at_.bank(), 0, 0);
  const bool is_row = offset < values;
  const auto fan_out = static_cast<uint64_t>(shape.fan_out());
  const uint64_t place = is_row ? (offset - rows) / shape.combine_bytes : (offset - values) / choice_bytes(shape.top_k);
  const auto token = static_cast<int>(place / fan_out);
  const auto [mate, list] = inbound_[owner];
  const int rail = topology_.rail[me_];
  std::byte* const row =
      returned_rows(mate, list, at_) + static_cast<uint64_t>(token * hosts_map_.local + rail) * folded.stride();
  std::memcpy(is_row ? row : row + folded.values_at(), source, n);
  const FoldTag tag{at_.step, static_cast<uint32_t>(place % fan_out + 1)};
  std::memcpy(lists_.of[mate]->data() + hosts_map_.tag(at_.channel, at_.bank(), list, token, rail), &tag, sizeof tag);
}

// Where the returns of a list lie: a message, or partials that `mate` folds for the owner of that list.
std::byte* FabricTransport::returned_rows(int mate, int list, StepPlace at) const {
  std::byte* const begin =
      hosts_map_.in_bank != 0 ? windows_[mate]->data() + map_.bank(at.channel, at.bank()) : lists_.of[mate]->data();
  return begin + hosts_map_.returns_at(at.channel, at.bank(), list);
}

// Gives the agent the step that has just been sent.
void FabricTransport::give_folds() {
  agent_->give([this, at = at_, folding = folding_](const std::function<bool()>& stopped) {
    for (const int mate : topology_.mates(me_)) {
      while (!has_signal(mate, at)) {
        if (stopped()) return;
        sleep(signal_at(mate, at), at.step, std::chrono::steady_clock::now() + kLongestSleep);
      }
    }
    for (int owner = 0; owner < ranks(); ++owner) {
      if (inbound_[owner].mate == me_) send_folds(owner, at, folding);
    }
  });
}

// Folds for one owner. Runs in the agent's thread, and shares nothing with the step that is being sent meanwhile: that
// one has another bank, or is on another channel.
void FabricTransport::send_folds(int owner, StepPlace at, const Folding& folding) {
  const int list = inbound_[owner].list;
  const Folded folded{at, folding, topology_.rail[owner]};
  const uint64_t staged = hosts_map_.staging_at(at.channel, at.bank()) + static_cast<uint64_t>(list) * hosts_map_.inbox;
  std::byte* const memory = lists_.of[me_]->data() + staged;
  HostMessage message;
  message.begin(memory + sizeof(uint64_t), hosts_map_.inbox - sizeof(uint64_t));
  const std::byte* const rows = returned_rows(me_, list, at);
  const int local = hosts_map_.local;
  const auto partials = [&](int token) {
    std::byte* const tags = lists_.of[me_]->data() + hosts_map_.tag(at.channel, at.bank(), list, token, 0);
    return Partials{reinterpret_cast<FoldTag*>(tags), rows + static_cast<uint64_t>(token * local) * folded.stride()};
  };
  std::vector<std::byte> scratch(folding.map.shape().combine_bytes);
  fold_into(message, folded, static_cast<int>(folding.map.shape().part_tokens()), local, partials, scratch.data());
  const uint64_t bytes = message.finish();
  std::memcpy(memory, &bytes, sizeof bytes);
  if (message.overflowed()) engine_->give_up(owner, fail(twInternalError, "folds have no room in an inbox"));
  const int there = topology_.list(me_, topology_.host[owner]);
  const net::Word word{{words_.number, hosts_map_.rows_word(at.channel, at.bank(), me_)}, kOneRowsWord};
  post(owner,
       {{lists_.number, staged},
        {lists_.number, hosts_map_.inbox_at(at.channel, at.bank(), there)},
        sizeof bytes + bytes},
       &word);
}

}  // namespace tw::cpu
