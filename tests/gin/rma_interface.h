// The interface of NCCL's RMA plugins, version 14, as far as its headers do not declare it (its source does, in
// src/include/plugin/rma/rma_v14.h). NCCL finds a table of these functions by the name ncclRmaPlugin_v14 in the library
// that NCCL_RMA_PLUGIN names. The order and the types of the members are the interface.
#pragma once

#include <nccl.h>

#include <cstddef>
#include <cstdint>

namespace tw::gin {

inline constexpr int kHandleBytes = 128;
inline constexpr int kPointsToHost = 1;  // kinds of memory, and bits of Properties::kinds
inline constexpr int kPointsToDevice = 2;
inline constexpr uint32_t kSignalIncrements = 1;
inline constexpr int kProxyDevice = 2;  // the type of a network that NCCL's thread drives

struct Properties {  // ncclNetProperties_v12_t
  char* name;
  char* pci_path;
  uint64_t guid;
  int kinds;
  int registration_is_global;
  int force_flush;
  int speed;  // Mbit/s
  int port;
  float latency;
  int max_comms;
  int max_receives;
  int device_type;
  int device_version;
  struct {
    int count;
    int devices[8];
  } physical;
  size_t max_p2p_bytes;
  size_t max_collective_bytes;
  int max_multi_request_size;
  int16_t rail;
  int16_t plane;
};

struct Config {
  int contexts;
  int traffic_class;
  int rank_stride;
};

using Logger = void (*)(int level, unsigned long flags, const char* file, int line, const char* format, ...);

struct RmaPlugin {
  const char* name;
  ncclResult_t (*init)(void** plugin, uint64_t comm, Logger logger);
  ncclResult_t (*devices)(int* count);
  ncclResult_t (*get_properties)(int device, Properties* properties);
  ncclResult_t (*listen)(void* plugin, int device, void* handle, void** listening);
  ncclResult_t (*connect)(void* plugin, void* handles[], int ranks, int rank, void* listening, void** connected);
  ncclResult_t (*create_context)(void* connected, Config* config, void** context);
  ncclResult_t (*add_memory)(void* connected, void* data, size_t size, int kind, uint64_t flags, void** memory);
  ncclResult_t (*add_dma_buf)(void* connected, void* data, size_t size, int kind, uint64_t offset, int fd,
                              uint64_t flags, void** memory);
  ncclResult_t (*drop_memory)(void* connected, void* memory);
  ncclResult_t (*destroy_context)(void* context);
  ncclResult_t (*close)(void* connected);
  ncclResult_t (*close_listening)(void* listening);
  ncclResult_t (*put)(void* context, int number, uint64_t from_offset, void* from, size_t size, uint64_t to_offset,
                      void* to, uint32_t rank, void** request);
  ncclResult_t (*put_signal)(void* context, int number, uint64_t from_offset, void* from, size_t size,
                             uint64_t to_offset, void* to, uint32_t rank, uint64_t signal_offset, void* signal,
                             uint64_t value, uint32_t operation, bool strong, void** request);
  ncclResult_t (*get)(void* context, int number, uint64_t remote_offset, void* remote, size_t size,
                      uint64_t local_offset, void* local, uint32_t rank, void** request);
  ncclResult_t (*flush)(void* context, int number, void* memory, uint32_t rank, void** request);
  ncclResult_t (*test)(void* connected, void* request, int* done);
  ncclResult_t (*progress)(void* context);
  ncclResult_t (*query_last_error)(void* context, bool* error);
  ncclResult_t (*finalize)(void* plugin);
};

}  // namespace tw::gin
