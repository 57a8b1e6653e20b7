// Maps the windows of a group over shared memory (cpu/window.h), and counts the cores that the ranks may run on, by
// which CpuTransport decides whether to spin (speed alone). Signals must be at the first step before a peer can see the
// window, so `fill` runs before the memory is shared.
#include "cpu/window.h"

#include <sched.h>

#include <cstring>

namespace tw::cpu {
namespace {

std::string usable_cores() {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  ::sched_getaffinity(0, sizeof cores, &cores);
  return {reinterpret_cast<const char*>(&cores), sizeof cores};
}

}  // namespace

Status map_windows(const BackendInit& init, Windows* windows) {
  const Context& context = *init.context;
  SharedMemory memory;
  const auto fill = [&](std::byte* window) { prepare_signals(context.map, context.first_step, window); };
  TW_RETURN_IF_FAILED(share_memory(*init.bootstrap, init.members, init.tag, init.deadline, context.map.bytes(), true,
                                   fill, usable_cores(), &memory));
  windows->by_rank = std::move(memory.by_rank);
  cpu_set_t together;
  CPU_ZERO(&together);
  for (const std::string& note : memory.notes) {
    cpu_set_t cores;
    CPU_ZERO(&cores);
    std::memcpy(&cores, note.data(), std::min(note.size(), sizeof cores));
    CPU_OR(&together, &together, &cores);
  }
  windows->cores = CPU_COUNT(&together);
  return {};
}

}  // namespace tw::cpu
