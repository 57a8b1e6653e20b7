// Status: what every internal function that can fail returns, a result and the sentence for the user. src/api turns it
// into a twResult_t and twLastError. TW_RETURN_IF_FAILED passes it up; a Status that is ignored is a compile-time
// warning, and an error that peers are not told of (S6).
#pragma once

#include <string>
#include <utility>

#include "tokenway/tokenway.h"

namespace tw {

struct [[nodiscard]] Status {
  twResult_t code = twSuccess;
  std::string text;

  bool ok() const { return code == twSuccess; }
};

// printf-style, because std::format is not in every libstdc++ that we build with.
[[gnu::format(printf, 2, 3)]] Status fail(twResult_t code, const char* format, ...);

// Does what fail(twSystemError) does, and adds the name and number of errno at the time of the call.
[[gnu::format(printf, 1, 2)]] Status fail_errno(const char* format, ...);

// Writes a size as sentences have it: "1.5 GiB", "640 KiB".
std::string bytes_text(unsigned long long bytes);

#define TW_RETURN_IF_FAILED(expression)                                     \
  do {                                                                      \
    if (::tw::Status status_ = (expression); !status_.ok()) return status_; \
  } while (0)

}  // namespace tw
