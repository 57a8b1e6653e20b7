// What dispatches tell beside their rows, on the CPU: load statistics, and how far this rank is with maps that move
// (exchange/epochs.h). What a dispatch tells goes out with its rows, in the step's bank and before its signal
// (S4), and is taken when the step has ended in data. It keeps an average for each channel, layer and expert; read()
// adds the channels up (core/placement.h). All ranks must take the same words in the same steps, or twGroupLoads
// differs between them.
#pragma once

#include <algorithm>
#include <vector>

#include "core/backend.h"
#include "exchange/epochs.h"
#include "exchange/loads.h"

namespace tw::cpu {

class Loads {
 public:
  explicit Loads(const Context& context) : context_(context), told_(words()) {
    const auto layers = static_cast<size_t>(context.spec->layers) * static_cast<size_t>(shape().channels);
    if (!counts()) return;
    averages_.assign(layers * static_cast<size_t>(shape().choices()), 0.0f);
    dispatches_.assign(layers, 0);
    clocks_.assign(layers, 0);
    told_of_.assign(static_cast<size_t>(context.spec->layers), 0);
    versions_.assign(static_cast<size_t>(shape().channels), MapVersion{});
  }

  bool counts() const { return shape().counts_loads != 0; }
  uint64_t bytes() const { return counts() ? told_.size() * sizeof(uint64_t) : 0; }
  uint64_t place(StepPlace at, int source) const { return context_.map.loads(at.channel, at.bank(), source); }

  // Makes what this rank tells of a dispatch: bytes() bytes.
  const void* tell(const DispatchCall& call, const HandleArrays& handle) {
    const uint32_t counted = call.counted ? CountedCall::value(handle.map.layer, ++told_of_[handle.map.layer]) : 0;
    told_[0] = told_word(call.at.step, counted);
    for (int32_t e = 0; e < shape().choices(); ++e) {
      told_[1 + e] = told_word(call.at.step, static_cast<uint32_t>(handle.map.choices[e]));
    }
    if (moves()) told_.back() = told_word(call.at.step, ready_);  // M2: once for all peers
    return told_.data();
  }

  // Tells every rank.
  template <class T>
  void put(T& transport, const DispatchCall& call, const HandleArrays& handle) {
    const void* const told = tell(call, handle);
    for (int rank = 0; rank < shape().ranks; ++rank) {
      transport.put_row(rank, place(call.at, context_.me), told, bytes());
    }
  }

  Status tell_ready(uint32_t word) { return ready_ = word, Status(); }
  MapVersion version(int32_t channel) const { return moves() ? versions_[channel] : MapVersion{}; }

  // Takes what all ranks have told of a dispatch that went well. The notes have said that all ranks count, or none
  // does.
  template <class T>
  void take(T& transport, const DispatchCall& call, const HandleArrays& handle) {
    if (moves()) take_version(transport, call.at);
    if (!counts() || !call.counted) return;
    const int64_t row = int64_t{call.at.channel} * context_.spec->layers + handle.map.layer;
    float* const averages = averages_.data() + row * shape().choices();
    sums_.assign(static_cast<size_t>(shape().choices()), 0);
    uint32_t later = CountedCall::kTurns;
    for (int source = 0; source < shape().ranks; ++source) {
      const auto* const told = reinterpret_cast<const uint64_t*>(transport.local(place(call.at, source)));
      later = std::min(later, CountedCall::since(CountedCall::clock(told_value(told[0])), clocks_[row]));
      for (int32_t e = 0; e < shape().choices(); ++e) sums_[e] += told_value(told[1 + e]);
    }
    later = std::max(later, 1u);  // a rank that has refused dispatches is behind
    const float decay = context_.spec->decay;
    for (int32_t e = 0; e < shape().choices(); ++e) {
      averages[e] = average_load(aged_load(averages[e], decay, later - 1), decay, sums_[e]);
    }
    clocks_[row] += later;
    ++dispatches_[row];
  }

  void read(float* loads, int64_t* dispatches) const {
    sum_channels(*context_.spec, shape(), {averages_.data(), dispatches_.data(), clocks_.data()}, loads, dispatches);
  }

 private:
  bool moves() const { return shape().moves != 0; }
  // All ranks have the same words, and take them where the dispatch has gone well on all of them.
  template <class T>
  void take_version(T& transport, StepPlace at) {
    MapVersion& version = versions_[at.channel];
    version = agreed_version(version, shape().ranks, [&](int source) {
      const auto* const told = reinterpret_cast<const uint64_t*>(transport.local(place(at, source)));
      return told_value(told[told_.size() - 1]);
    });
  }

  const Shape& shape() const { return context_.map.shape(); }
  size_t words() const { return counts() ? WindowMap::loads_words(shape()) : 0; }

  const Context& context_;
  std::vector<uint64_t> told_;
  std::vector<uint32_t> sums_;
  std::vector<float> averages_;       // [channels, layers, E]
  std::vector<int64_t> dispatches_;   // [channels, layers]
  std::vector<uint32_t> clocks_;      // [channels, layers] CountedCall clock of the last dispatch in the averages
  std::vector<uint32_t> told_of_;     // [layers] how many dispatches this rank has told
  std::vector<MapVersion> versions_;  // [channels], where maps move
  uint32_t ready_ = 0;                // ready_word
};

}  // namespace tw::cpu
