// What the entry points that make comms have in common (comm.cc, fabric.cc, gin.cc): their arguments, checked, become a
// comm that callers can name.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "core/comm.h"
#include "tokenway/tokenway.h"

namespace tw::api {

TimePoint after(int32_t milliseconds);

// Reads what all comms read beside their config: the environment, and how long to wait where the config does not say.
Status settle_timeout(int32_t* timeout_ms, Environment* environment);
// Reads a config; NULL: the defaults.
Status read_comm_config(const twCommConfig_t* given, Environment* environment, twCommConfig_t* config);
Status check_rank(int32_t rank, int32_t nranks);
// Fails unless there is such a CUDA device; -1 becomes the thread's current one.
Status find_device(const Argument& name, int* device);

// What ranks on several hosts must have alike, and the names of the arguments that it comes from.
struct Alike {
  std::string note;
  Sentence what;
};
// Connects ranks of any hosts: over TCP, and within each host over Unix sockets. They find out by the caller's own
// allgather who is on which host; ranks_per_host as in twCommConfig_t. Collective. `ready`: why this rank cannot take
// part; the others are told.
Status meet_hosts(int rank, int size, const std::function<int(const void*, void*, size_t)>& allgather,
                  int ranks_per_host, const Alike& alike, const Status& ready, TimePoint deadline, Hosts* hosts,
                  std::unique_ptr<Bootstrap>* mesh);

// Makes a comm of ranks that are connected, and registers it.
twComm* make_comm(std::unique_ptr<Bootstrap> bootstrap, const Environment& environment, int32_t timeout_ms);

}  // namespace tw::api
