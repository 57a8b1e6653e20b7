// Builds the sentences of a Status: printf-style formatting, errno with its name and number, and sizes as people write
// them. fail_errno must read errno before anything else can change it. Nothing but the text of errors depends on this
// file.
#include "core/status.h"

#include <cerrno>
#include <cstdarg>
#include <cstdio>
#include <cstring>

namespace tw {
namespace {

std::string vformat(const char* format, va_list args) {
  va_list again;
  va_copy(again, args);
  const int length = std::vsnprintf(nullptr, 0, format, again);
  va_end(again);
  std::string text(length > 0 ? static_cast<size_t>(length) : 0, '\0');
  std::vsnprintf(text.data(), text.size() + 1, format, args);
  return text;
}

}  // namespace

Status fail(twResult_t code, const char* format, ...) {
  va_list args;
  va_start(args, format);
  Status status{code, vformat(format, args)};
  va_end(args);
  return status;
}

Status fail_errno(const char* format, ...) {
  const int error = errno;
  va_list args;
  va_start(args, format);
  Status status{twSystemError, vformat(format, args)};
  va_end(args);
  status.text += std::string(": ") + std::strerror(error) + " (errno " + std::to_string(error) + ")";
  return status;
}

std::string bytes_text(unsigned long long bytes) {
  const char* const units[] = {"bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  double value = static_cast<double>(bytes);
  int unit = 0;
  while (value >= 1024.0 && unit < 6) {
    value /= 1024.0;
    ++unit;
  }
  char text[48];
  std::snprintf(text, sizeof text, unit == 0 ? "%.0f %s" : "%.1f %s", value, units[unit]);
  return text;
}

}  // namespace tw
