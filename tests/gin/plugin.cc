// A network for NCCL where there is none: an RMA plugin (rma_interface.h) over sockets (links.h). NCCL's own thread,
// its queues and its device code are the real ones; what is beneath them stands for a NIC.
//
//   NCCL_RMA_PLUGIN=.../tokenway_gin_plugin.so, and where all ranks are on one host, NCCL_LSA_TEAM_SIZE=1
#include <unistd.h>

#include <cstring>
#include <memory>

#include "counts.h"
#include "links.h"
#include "rma_interface.h"

namespace tw::gin {
namespace {

struct Listening {
  int fd;
};

struct Context {
  Links* links;
  int ranks;
};

struct Connected {
  Links links;
  int ranks;
};

// NCCL keeps a request as a pointer until test has said that it is done.
using Held = std::shared_ptr<Request>;

ncclResult_t init(void** plugin, uint64_t, Logger) {
  *plugin = new char;
  return ncclSuccess;
}

ncclResult_t devices(int* count) {
  *count = 1;
  return ncclSuccess;
}

ncclResult_t get_properties(int, Properties* properties) {
  static char name[] = "tokenway0";
  constexpr size_t kNoLimit = size_t{1} << 40;
  *properties = Properties{};
  properties->name = name;
  properties->guid = 1;
  properties->kinds = kPointsToHost | kPointsToDevice;
  properties->speed = 100000;
  properties->port = 1;
  properties->max_comms = 65536;
  properties->max_receives = 8;
  properties->device_type = kProxyDevice;
  properties->device_version = 100;
  properties->physical.count = 1;
  properties->max_p2p_bytes = kNoLimit;
  properties->max_collective_bytes = kNoLimit;
  properties->max_multi_request_size = 1;
  properties->rail = -1;
  properties->plane = -1;
  return ncclSuccess;
}

ncclResult_t listen(void*, int, void* handle, void** listening) {
  const int fd = Links::listen(handle);
  if (fd < 0) return ncclSystemError;
  *listening = new Listening{fd};
  return ncclSuccess;
}

ncclResult_t connect(void*, void* handles[], int ranks, int rank, void* listening, void** connected) {
  auto made = std::unique_ptr<Connected>(new Connected{{rank, ranks}, ranks});
  if (!made->links.connect(handles, static_cast<Listening*>(listening)->fd)) return ncclSystemError;
  *connected = made.release();
  return ncclSuccess;
}

ncclResult_t create_context(void* connected, Config*, void** context) {
  auto* const to = static_cast<Connected*>(connected);
  *context = new Context{&to->links, to->ranks};
  return ncclSuccess;
}

ncclResult_t add_memory(void* connected, void* data, size_t size, int kind, uint64_t, void** memory) {
  *memory = static_cast<Connected*>(connected)->links.add_memory(data, size, kind);
  return ncclSuccess;
}

ncclResult_t add_dma_buf(void*, void*, size_t, int, uint64_t, int, uint64_t, void**) { return ncclInvalidUsage; }

ncclResult_t drop_memory(void* connected, void* memory) {
  static_cast<Connected*>(connected)->links.drop(static_cast<Memory*>(memory));
  return ncclSuccess;
}

ncclResult_t destroy_context(void* context) {
  delete static_cast<Context*>(context);
  return ncclSuccess;
}

ncclResult_t close(void* connected) {
  delete static_cast<Connected*>(connected);
  return ncclSuccess;
}

ncclResult_t close_listening(void* listening) {
  ::close(static_cast<Listening*>(listening)->fd);
  delete static_cast<Listening*>(listening);
  return ncclSuccess;
}

ncclResult_t post(void* context, int number, uint32_t rank, Operation operation, void** request) {
  const auto* const to = static_cast<const Context*>(context);
  if (rank >= static_cast<uint32_t>(to->ranks)) return ncclInvalidArgument;
  *request = new Held(to->links->post(static_cast<int>(rank), {context, number}, std::move(operation)));
  return ncclSuccess;
}

Operation put_of(uint64_t from_offset, void* from, size_t size, uint64_t to_offset, void* to) {
  Operation operation;
  if (size == 0) return operation;
  operation.from = static_cast<const Memory*>(from);
  operation.from_offset = from_offset;
  operation.size = size;
  operation.to = static_cast<const Memory*>(to)->number;
  operation.to_offset = to_offset;
  return operation;
}

ncclResult_t put(void* context, int number, uint64_t from_offset, void* from, size_t size, uint64_t to_offset, void* to,
                 uint32_t rank, void** request) {
  return post(context, number, rank, put_of(from_offset, from, size, to_offset, to), request);
}

ncclResult_t put_signal(void* context, int number, uint64_t from_offset, void* from, size_t size, uint64_t to_offset,
                        void* to, uint32_t rank, uint64_t signal_offset, void* signal, uint64_t value,
                        uint32_t operation, bool, void** request) {
  Operation posted = put_of(from_offset, from, size, to_offset, to);
  posted.signals = true;
  posted.word = static_cast<const Memory*>(signal)->number;
  posted.word_offset = signal_offset;
  posted.add = operation == kSignalIncrements ? 1 : value;
  return post(context, number, rank, std::move(posted), request);
}

ncclResult_t get(void*, int, uint64_t, void*, size_t, uint64_t, void*, uint32_t, void**) { return ncclInvalidUsage; }

// What has been put is there when its word is: nothing is left to flush.
ncclResult_t flush(void*, int, void*, uint32_t, void** request) {
  *request = nullptr;
  return ncclSuccess;
}

ncclResult_t test(void*, void* request, int* done) {
  auto* const held = static_cast<Held*>(request);
  const Request::State state = (*held)->state;
  *done = state == Request::kWaiting ? 0 : 1;
  if (state == Request::kWaiting) return ncclSuccess;
  delete held;
  return state == Request::kDone ? ncclSuccess : ncclRemoteError;
}

ncclResult_t query_last_error(void* context, bool* error) {
  *error = static_cast<const Context*>(context)->links->failed();
  return ncclSuccess;
}

ncclResult_t finalize(void* plugin) {
  delete static_cast<char*>(plugin);
  return ncclSuccess;
}

}  // namespace
}  // namespace tw::gin

extern "C" {
// Gives what was posted since it was last asked: [ranks, ranks, kPostKinds], by source and peer (counts.h).
__attribute__((visibility("default"))) void tokenway_posts(int ranks, uint64_t* found) {
  tw::gin::post_counts().take(ranks, found);
}

__attribute__((visibility("default"))) tw::gin::RmaPlugin ncclRmaPlugin_v14 = {
    "Tokenway's sockets",
    tw::gin::init,
    tw::gin::devices,
    tw::gin::get_properties,
    tw::gin::listen,
    tw::gin::connect,
    tw::gin::create_context,
    tw::gin::add_memory,
    tw::gin::add_dma_buf,
    tw::gin::drop_memory,
    tw::gin::destroy_context,
    tw::gin::close,
    tw::gin::close_listening,
    tw::gin::put,
    tw::gin::put_signal,
    tw::gin::get,
    tw::gin::flush,
    tw::gin::test,
    nullptr,  // progress is the links' own
    tw::gin::query_last_error,
    tw::gin::finalize,
};
}  // extern "C"
