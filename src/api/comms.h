// What the entry points that make comms have in common (comm.cc, fabric.cc): their arguments, checked, become a comm
// that callers can name.
#pragma once

#include <memory>

#include "core/comm.h"
#include "tokenway/tokenway.h"

namespace tw::api {

TimePoint after(int32_t milliseconds);

// Reads what all comms read beside their config: the environment, and how long to wait where the config does not say.
Status settle_timeout(int32_t* timeout_ms, Environment* environment);
// Reads a config; NULL: the defaults.
Status read_comm_config(const twCommConfig_t* given, Environment* environment, twCommConfig_t* config);
Status check_rank(int32_t rank, int32_t nranks);

// Makes a comm of ranks that are connected, and registers it.
twComm* make_comm(std::unique_ptr<Bootstrap> bootstrap, const Environment& environment, int32_t timeout_ms);

}  // namespace tw::api
