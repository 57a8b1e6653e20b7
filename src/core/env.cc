// The table of the environment variables that the library reads: name, default, range and meaning. docs and
// twEnvironment show it. read_environment parses all of them once per comm. FIRST_STEP and LINE_TOKENS must be equal on
// all ranks, which core/config.cc compares.
#include "core/env.h"

#include <cerrno>
#include <cstdlib>

namespace tw {
namespace {

struct Variable {
  const char* name;
  int64_t fallback;
  int64_t low;
  int64_t high;
  const char* doc;
};

enum Index { kTimeout, kSpin, kCache, kShrink, kFirstStep, kPacketTokens, kBlocking, kNoWait, kCount };

constexpr Variable kVariables[kCount] = {
    {"TOKENWAY_TIMEOUT_MS", 100000, 1, INT32_MAX,
     "Milliseconds after which a late peer is an error, where a configuration says 0. Default 100000: checkpoints and "
     "compilation skew ranks."},
    {"TOKENWAY_SPIN_US", -1, -1, 1000000,
     "CPU backend: microseconds to poll for a signal before sleeping on it. Default -1: 20 where every rank has a core "
     "of its own, else 0."},
    {"TOKENWAY_CACHE_BYTES", 0, 0, INT64_MAX,
     "CPU backend: steps of more bytes than this are written past the caches. Default 0: the size of the last-level "
     "cache."},
    {"TOKENWAY_SHRINK_MS", 10000, 1, INT32_MAX,
     "Milliseconds that survivors of an error wait for each other, if the group's timeout is shorter. Default 10000."},
    {"TOKENWAY_FIRST_STEP", 0, 0, UINT32_MAX,
     "Step that lanes count from, the same on all ranks. For tests of the wrap at 2^32. Default 0."},
    {"TOKENWAY_LINE_TOKENS", -1, -1, 1 << 20,
     "CUDA backend: at most so many tokens of a rank travel as LL128 packets, the same on all ranks; 0: none. Default "
     "-1: as measured (docs/notebook/dispatch.md)."},
    {"TOKENWAY_BLOCKING", 0, 0, 1,
     "CUDA backend: 1 makes every call wait for its stream and return its own error. For debugging. Default 0."},
    {"TOKENWAY_UNSAFE_NO_WAIT", 0, 0, 1,
     "CUDA backend: 1 leaves all waiting out, so that RESULTS ARE WRONG. For measuring what waiting costs. Default 0."},
};

Status parse(const Variable& variable, int64_t* value) {
  *value = variable.fallback;
  const char* text = std::getenv(variable.name);
  if (text == nullptr || *text == '\0') return {};
  char* end = nullptr;
  errno = 0;
  *value = std::strtoll(text, &end, 10);
  if (errno != 0 || *end != '\0' || *value < variable.low || *value > variable.high) {
    return fail(twInvalidArgument, "environment variable {} is \"{}\"; it must be an integer from {} to {}",
                variable.name, text, variable.low, variable.high);
  }
  return {};
}

}  // namespace

Status read_environment(Environment* environment) {
  int64_t values[kCount];
  for (int i = 0; i < kCount; ++i) TW_RETURN_IF_FAILED(parse(kVariables[i], &values[i]));
  environment->timeout_ms = static_cast<int32_t>(values[kTimeout]);
  environment->spin_us = static_cast<int32_t>(values[kSpin]);
  environment->cache_bytes = static_cast<uint64_t>(values[kCache]);
  environment->shrink_ms = static_cast<int32_t>(values[kShrink]);
  environment->first_step = static_cast<uint32_t>(values[kFirstStep]);
  environment->packet_tokens = static_cast<int32_t>(values[kPacketTokens]);
  environment->blocking = values[kBlocking] != 0;
  environment->no_wait = values[kNoWait] != 0;
  return {};
}

bool describe_variable(int index, const char** name, std::string* value, const char** doc) {
  if (index < 0 || index >= kCount) return false;
  const Variable& variable = kVariables[index];
  *name = variable.name;
  *doc = variable.doc;
  int64_t number = 0;
  const Status status = parse(variable, &number);
  *value = status.ok() ? std::to_string(number) : status.text();
  return true;
}

}  // namespace tw
