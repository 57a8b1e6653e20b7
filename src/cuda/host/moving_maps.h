// Maps that move, as the host brings them to a device (core/moving.h): a layer's next map, which of its two maps is the
// later one, and how far this rank is. All of it goes by copies on one stream, out of pinned memory, so nothing here
// waits for the device, and the device has a map before it can tell that this rank has it (M2).
//
// What breaks if this changes: memory that a copy reads may be written again when what was told behind that copy has
// come back: an epoch that all lanes have was told by this rank. A layer has one epoch open, and at most
// kMostOpenEpochs are, so a place for each layer's map, and one for each of so many words, are enough.
#pragma once

#include <cuda_runtime.h>

#include <vector>

#include "core/backend.h"
#include "cuda/launch/expert_tables.h"

namespace tw::cuda {

// The words of a layer's map, MapWords::all of them.
std::vector<uint32_t> words_of_map(const Shape& shape, const ExpertMap& map);

class MovingMaps {
 public:
  // Where kernels read: two maps for each layer, one behind the other; MapHead of each layer; ready_word.
  struct Place {
    uint32_t* maps;
    uint32_t* heads;
    uint32_t* ready;
  };

  MovingMaps() = default;
  MovingMaps(const MovingMaps&) = delete;
  MovingMaps& operator=(const MovingMaps&) = delete;
  ~MovingMaps();  // copies have ended

  Status create(const Shape& shape, int32_t layers, Place place, cudaStream_t stream);

  // Makes a layer's next map known; no kernel of this rank reads the map before the last.
  Status stage(int32_t layer, uint32_t epoch, const Shape& shape, const ExpertMap& map);
  // The layer's last epoch is decided on all lanes: void, unless `used`.
  Status close(int32_t layer, bool used);
  // Tells a ready_word, behind the maps that it is about.
  Status tell(uint32_t word);

 private:
  struct Layer {
    uint32_t later = 0;       // which of the two maps
    uint32_t epochs[2] = {};  // theirs
  };

  Status make_later(int32_t layer, uint32_t which);
  Status copy(uint32_t* to, const uint32_t* from, int64_t words);

  std::vector<Layer> layers_;
  Place place_{};
  cudaStream_t stream_ = nullptr;
  int64_t words_ = 0;           // of a map
  uint32_t* pinned_ = nullptr;  // maps [layers], heads [layers, 2], ready words [kMostOpenEpochs + 1]
};

}  // namespace tw::cuda
