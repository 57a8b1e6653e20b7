// Device memory of a group beside its window and what it shares (host/arena.h): the tables that kernels read, blocks
// for handles, and pages of host memory into which the device tells counts and load statistics.
//
// Takes the group's context; fills the pointers of a GroupView. Blocks may be used by any stream at once.
//
// What breaks if this changes: write_map() may be called only while no kernel of this rank runs (S9).
#pragma once

#include <memory>
#include <vector>

#include "core/backend.h"
#include "cuda/driver/driver.h"
#include "cuda/host/moving_maps.h"
#include "cuda/launch/counts.h"
#include "cuda/launch/group_view.h"
#include "cuda/launch/view.h"

namespace tw::cuda {

class GroupMemory {
 public:
  ~GroupMemory();

  // Makes the memory, and fills the pointers of `view`.
  static Status create(const Context& context, GroupView* view, std::unique_ptr<GroupMemory>* memory);

  // Blocks for handles. Memory comes and goes on a stream of its own, so nothing here waits for kernels on the
  // device.
  std::byte* allocate(size_t bytes);
  void release(std::byte* block);

  // Gives CountsParams::told of a channel, [N + E].
  int32_t* told(int channel, const Shape& shape) const {
    return told_ + int64_t{channel} * (shape.ranks + shape.experts);
  }
  // Gives a layer's MapWords, where maps move the first of two.
  const uint32_t* map(int32_t layer, const Shape& shape) const { return maps_ + map_at(layer, shape); }
  // Replaces a layer's map, while no kernel of this rank runs.
  Status write_map(int32_t layer, const Shape& shape, const ExpertMap& map);
  // In a group whose maps move.
  MovingMaps& moving() { return moving_; }
  MapVersion version(int32_t channel) const {
    return unpack_version(__atomic_load_n(&loads_.moving.versions_there[channel], __ATOMIC_ACQUIRE));
  }
  // Gives BalanceParams::scratch of a channel.
  int32_t* balance(int32_t channel, const Shape& shape) const {
    return BalanceParams::fits(shape) ? nullptr : balance_ + int64_t{channel} * BalanceParams::scratch_words(shape);
  }
  // Gives IndexParams::counted of a channel.
  int32_t* list_counts(int32_t channel, int32_t local_experts) const {
    return list_words(local_experts) == 0 ? nullptr : list_counts_ + channel * list_words(local_experts);
  }
  // Gives what twGroupLoads shows, as far as the device has told it.
  void read_loads(const Context& context, float* loads, int64_t* dispatches) const;
  // Gives a page of host memory for what an exchange of counts tells the host; NULL if there is no memory.
  CountsOnHost* take_page();
  // Gives a page back. `serial`: of the last exchange that writes to it, which may still be under way.
  void give_page(CountsOnHost* page, uint64_t serial) { given_pages_.push_back({page, serial}); }

  // Makes GroupView::marks for a larger shape; those that there are stay.
  Status make_marks(const Shape& shape, uint32_t** marks);

 private:
  GroupMemory() = default;
  Status show_loads(size_t averages, size_t rows, size_t channels);
  static int64_t map_at(int32_t layer, const Shape& shape) {
    return int64_t{layer} * (1 + shape.moves) * MapWords::all(shape);
  }

  cudaStream_t stream_ = nullptr;
  std::byte* tables_ = nullptr;
  std::vector<void*> more_marks_;
  int32_t* told_ = nullptr;
  uint32_t* maps_ = nullptr;
  int32_t* balance_ = nullptr;
  int32_t* list_counts_ = nullptr;
  LoadsView loads_{};
  MovingMaps moving_;
  static constexpr size_t kPages = 16;           // most pages that are allocated at a time
  static constexpr size_t kPageBlock = 1 << 18;  // bytes that these may have together, unless one alone has more
  size_t page_bytes_ = 0;
  std::vector<void*> page_blocks_;
  struct GivenPage {
    CountsOnHost* page;
    uint64_t serial;
  };
  std::vector<GivenPage> given_pages_;
  std::vector<CountsOnHost*> free_pages_;
};

}  // namespace tw::cuda
