// The kinds of Status that many files make: errno with its name and number, an integer out of its range, and sizes as
// people write them. Nothing but the text of errors depends on this file.
#include "core/status.h"

#include <cstdio>
#include <cstring>

namespace tw {

Status fail_with(int error, Sentence sentence) {
  sentence.append(compose(": {} (errno {})", std::strerror(error), error));
  return {twSystemError, std::move(sentence)};
}

Status check_range(const Argument& argument, int64_t value, int64_t least, int64_t most) {
  if (value >= least && value <= most) return {};
  return fail(twInvalidArgument, "{} is {}; it must be from {} to {}", argument, Value(value), Least(least),
              Most(most));
}

Status check_switch(const Argument& argument, int32_t value) {
  if (value == 0 || value == 1) return {};
  return fail(twInvalidArgument, "{} is {}; it must be 0 or 1", argument, Value(value));
}

std::string bytes_text(unsigned long long bytes) {
  const char* const suffixes[] = {"bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  double value = static_cast<double>(bytes);
  int suffix = 0;
  while (value >= 1024.0 && suffix < 6) {
    value /= 1024.0;
    ++suffix;
  }
  char text[48];
  std::snprintf(text, sizeof text, suffix == 0 ? "%.0f %s" : "%.1f %s", value, suffixes[suffix]);
  return text;
}

}  // namespace tw
