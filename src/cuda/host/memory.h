// Device memory of a group beside its window: the tables and states that kernels read, and blocks for handles.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "core/backend.h"
#include "cuda/driver/driver.h"
#include "cuda/launch/counts.h"
#include "cuda/launch/group_view.h"

namespace tw::cuda {

class Arena {
 public:
  ~Arena();

  // Fills the pointers of `view`.
  static Status create(const Context& context, const std::vector<std::byte*>& windows,
                       const std::vector<ControlPage*>& pages, GroupView* view, std::unique_ptr<Arena>* arena);

  // Blocks for handles. Memory comes and goes on the arena's own stream, so nothing here waits for the device.
  std::byte* allocate(size_t bytes);
  void release(std::byte* block);

  // [N + E] of a lane: CountsParams::told.
  int32_t* told(int lane, const Shape& shape) const { return told_ + int64_t{lane} * (shape.ranks + shape.experts); }
  // MapWords of a layer.
  const uint32_t* map(int32_t layer, const Shape& shape) const { return maps_ + int64_t{layer} * MapWords::all(shape); }
  // Replaces it, while no kernel of this rank runs.
  Status write_map(int32_t layer, const Shape& shape, const ExpertMap& map);
  // BalanceParams::scratch of a lane.
  int32_t* balance(int32_t lane, const Shape& shape) const {
    return BalanceParams::fits(shape) ? nullptr : balance_ + int64_t{lane} * BalanceParams::scratch_words(shape);
  }
  // What twGroupLoads shows, as far as the device has told it.
  void read_loads(const Context& context, float* loads, int64_t* dispatches) const;
  // A page of host memory for what an exchange of counts tells the host. NULL if there is none.
  CountsOnHost* take_page();
  // `serial`: of the last exchange that writes to it, which may still be under way.
  void give_page(CountsOnHost* page, uint64_t serial) { given_pages_.push_back({page, serial}); }

  // Runs something on the arena's stream with a counter that is 0, waits for it and gives what it counted.
  Status with_counter(uint32_t* count, const std::function<Status(uint32_t*, cudaStream_t)>& run);

  // Makes every kernel that starts from now on do nothing. From any thread.
  void stop_kernels();

 private:
  Arena() = default;
  Status show_loads(size_t averages, size_t rows);

  cudaStream_t stream_ = nullptr;
  std::byte* tables_ = nullptr;
  DeviceState* state_ = nullptr;
  uint32_t* counter_ = nullptr;
  int32_t* told_ = nullptr;
  uint32_t* maps_ = nullptr;
  int32_t* balance_ = nullptr;
  LoadsView loads_{};
  static constexpr int kPages = 16;  // that are allocated at a time
  std::vector<CountsOnHost*> page_blocks_;
  struct GivenPage {
    CountsOnHost* page;
    uint64_t serial;
  };
  std::vector<GivenPage> given_pages_;
  std::vector<CountsOnHost*> free_pages_;
};

}  // namespace tw::cuda
