// Every environment variable that the library reads, as a struct. Names, types, defaults and meanings stand in env.cc
// and nowhere else. A comm reads all of them when it is created; a variable that does not parse fails that call, with a
// sentence that names it. A variable that is read elsewhere is missing in twEnvironment.
#pragma once

#include <cstdint>
#include <string>

#include "core/status.h"

namespace tw {

struct Environment {
  int32_t timeout_ms;     // TOKENWAY_TIMEOUT_MS
  int32_t spin_us;        // TOKENWAY_SPIN_US, -1: decided from the number of cores
  uint64_t cache_bytes;   // TOKENWAY_CACHE_BYTES, 0: as the machine says
  int32_t shrink_ms;      // TOKENWAY_SHRINK_MS
  uint32_t first_step;    // TOKENWAY_FIRST_STEP
  int32_t packet_tokens;  // TOKENWAY_LINE_TOKENS, -1: decided by the backend
  bool blocking;          // TOKENWAY_BLOCKING
  bool no_wait;           // TOKENWAY_UNSAFE_NO_WAIT
};

// Reads and checks all variables; a value that does not parse is an error that names it.
Status read_environment(Environment* environment);

// Describes the index-th variable, for twEnvironment; false past the end.
bool describe_variable(int index, const char** name, std::string* value, const char** doc);

}  // namespace tw
