// Maps that move, brought to a device: moving_maps.h says what may be written when.
#include "cuda/host/moving_maps.h"

#include <algorithm>

#include "cuda/driver/driver.h"

namespace tw::cuda {

std::vector<uint32_t> words_of_map(const Shape& shape, const ExpertMap& map) {
  const Replicas replicas = map.view();
  std::vector<uint32_t> words(MapWords::all(shape), 0);
  words[MapWords::kDigest] = map.digest();
  words[MapWords::kSeveral] = static_cast<uint32_t>(replicas.several_count);
  uint32_t* const first = words.data() + MapWords::kFirst;
  const int32_t chosen = replicas.first[shape.choices()];
  std::copy_n(replicas.first, shape.choices() + 1, first);
  std::copy_n(replicas.slots, chosen, first + MapWords::slots(shape));
  if (replicas.lower != nullptr) std::copy_n(replicas.lower, chosen, first + MapWords::lower(shape));
  std::copy_n(replicas.several, replicas.several_count, first + MapWords::several(shape));
  return words;
}

MovingMaps::~MovingMaps() {
  const OutsideCaptures outside;
  if (pinned_ != nullptr) cudaFreeHost(pinned_);
}

Status MovingMaps::create(const Shape& shape, int32_t layers, Place place, cudaStream_t stream) {
  words_ = MapWords::all(shape);
  const int64_t all = layers * (words_ + 2) + kMostOpenEpochs + 1;
  void* made = nullptr;
  TW_CUDA(cudaHostAlloc(&made, sizeof(uint32_t) * static_cast<size_t>(all), cudaHostAllocPortable));
  pinned_ = static_cast<uint32_t*>(made);
  layers_.resize(static_cast<size_t>(layers));
  place_ = place;
  stream_ = stream;
  return {};
}

Status MovingMaps::stage(int32_t layer, uint32_t epoch, const Shape& shape, const ExpertMap& map) {
  Layer& maps = layers_[static_cast<size_t>(layer)];
  const uint32_t next = maps.later ^ 1;
  uint32_t* const from = pinned_ + layer * words_;
  std::ranges::copy(words_of_map(shape, map), from);
  maps.epochs[next] = epoch;
  TW_RETURN_IF_FAILED(copy(place_.maps + (2 * layer + next) * words_, from, words_));
  return make_later(layer, next);
}

// Behind a void epoch the map in force is the later one again: bits that say what was void do not stay for ever.
Status MovingMaps::close(int32_t layer, bool used) {
  return used ? Status{} : make_later(layer, layers_[static_cast<size_t>(layer)].later ^ 1);
}

Status MovingMaps::tell(uint32_t word) {
  const auto layers = static_cast<int64_t>(layers_.size());
  // A word ends in its epoch, and epochs that are open have places of their own: a copy that is under way must not
  // carry a later one.
  uint32_t* const from = pinned_ + layers * (words_ + 2) + word % (kMostOpenEpochs + 1);
  *from = word;
  return copy(place_.ready, from, 1);
}

// Makes one of a layer's two maps the later one. Each has a place for its word.
Status MovingMaps::make_later(int32_t layer, uint32_t which) {
  Layer& maps = layers_[static_cast<size_t>(layer)];
  uint32_t* const from = pinned_ + static_cast<int64_t>(layers_.size()) * words_ + 2 * layer + which;
  *from = MapHead::word(maps.epochs[which], which);
  maps.later = which;
  return copy(place_.heads + layer, from, 1);
}

Status MovingMaps::copy(uint32_t* to, const uint32_t* from, int64_t words) {
  const OutsideCaptures outside;
  const size_t bytes = sizeof(uint32_t) * static_cast<size_t>(words);
  TW_CUDA(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, stream_));
  return {};
}

}  // namespace tw::cuda
