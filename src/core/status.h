// Status: what every internal function that can fail returns, a result and the sentence for the user. src/api turns it
// into a twResult_t and twLastError. TW_RETURN_IF_FAILED passes it up; a Status that is ignored is a compile-time
// warning, and an error that peers are not told of (S6).
#pragma once

#include <cerrno>
#include <string>
#include <utility>

#include "core/sentence.h"
#include "tokenway/tokenway.h"

namespace tw {

struct [[nodiscard]] Status {
  twResult_t code = twSuccess;
  Sentence sentence;

  bool ok() const { return code == twSuccess; }
  std::string text() const { return sentence.text(); }
};

// Cold, and never inlined: callers fail in hundreds of places, which would all hold what makes a sentence.
template <class... Values>
[[gnu::cold, gnu::noinline]] Status fail(twResult_t code, Format<std::type_identity_t<Values>...> format,
                                         const Values&... values) {
  return {code, fill(format.text, {Sentence(values)...})};
}

// Fails with twSystemError and a sentence, to which it adds the name and number of an errno.
Status fail_with(int error, Sentence sentence);
// The same of errno at the time of the call.
template <class... Values>
[[gnu::cold, gnu::noinline]] Status fail_errno(Format<std::type_identity_t<Values>...> format,
                                               const Values&... values) {
  const int error = errno;
  return fail_with(error, fill(format.text, {Sentence(values)...}));
}

// Fails with twInvalidArgument unless an integer is in its range.
Status check_range(const Argument& argument, int64_t value, int64_t least, int64_t most);
// The same of an integer that says yes or no.
Status check_switch(const Argument& argument, int32_t value);

// Writes a size as sentences have it: "1.5 GiB", "640 KiB".
std::string bytes_text(unsigned long long bytes);

#define TW_RETURN_IF_FAILED(expression)                                     \
  do {                                                                      \
    if (::tw::Status status_ = (expression); !status_.ok()) return status_; \
  } while (0)

}  // namespace tw
