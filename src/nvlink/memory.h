// Device memory of a group beside its window: the tables and states that kernels read, and blocks for handles.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "core/backend.h"
#include "nvlink/driver.h"
#include "nvlink/params.h"

namespace tw::nvlink {

class Arena {
 public:
  ~Arena();

  // Fills the pointers of `view`.
  static Status create(const Context& context, const std::vector<std::byte*>& windows,
                       const std::vector<ControlPage*>& pages, GroupView* view, std::unique_ptr<Arena>* arena);

  // Blocks for handles. Memory comes and goes on the arena's own stream, so nothing here waits for the device.
  std::byte* allocate(size_t bytes);
  void release(std::byte* block);

  // Runs something on the arena's stream with a counter that is 0, waits for it and gives what it counted.
  Status with_counter(uint32_t* count, const std::function<Status(uint32_t*, cudaStream_t)>& run);

  // Makes every kernel that starts from now on do nothing. From any thread.
  void stop_kernels();

 private:
  Arena() = default;

  cudaStream_t stream_ = nullptr;
  std::byte* tables_ = nullptr;
  DeviceState* state_ = nullptr;
  uint32_t* counter_ = nullptr;
};

}  // namespace tw::nvlink
