// What the entry points that make comms have in common (comm.cc, fabric.cc, gin.cc): their arguments, checked, become a
// comm that callers can name. meet_hosts.cc has what those have in common whose ranks are on several hosts.
#pragma once

#include <memory>
#include <string>
#include <vector>

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

// Checks what a comm of any hosts is made with, and reads it; its allgather must be given.
Status read_hosts_config(const twComm_t* comm, int32_t rank, int32_t nranks, const twCommConfig_t* given,
                         Environment* environment, twCommConfig_t* config);

// What ranks on several hosts must have alike, and the names of the arguments that it comes from.
struct Alike {
  std::string note;
  Sentence what;
};
// Ranks of any hosts that have met.
struct MetHosts {
  std::unique_ptr<Hosts> hosts;
  std::unique_ptr<Bootstrap> mesh;
  std::vector<int> all;  // ranks
  TimePoint deadline;
};
// The first tag of what such ranks do together before their comm's first occasion, behind their meeting.
inline constexpr uint64_t kBehindMeeting = (uint64_t{1} << 16) + 1;
// Connects them: over TCP, and within each host over Unix sockets. They find out by the caller's own allgather who is
// on which host. Collective. `ready`: why this rank cannot take part; the others are told.
Status meet_hosts(int32_t rank, int32_t nranks, const twCommConfig_t& config, const Alike& alike, const Status& ready,
                  MetHosts* met);

// Makes a comm of ranks that are connected, and registers it.
twComm* make_comm(std::unique_ptr<Bootstrap> bootstrap, const Environment& environment, int32_t timeout_ms);

}  // namespace tw::api
