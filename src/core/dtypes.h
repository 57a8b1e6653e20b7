// Types of elements: how many bytes one has, its name in sentences, and whether rows of it can be summed. The table is
// in the order of twDtype_t; a type that is out of its place there gives rows other bytes than on a peer of another
// build.
#pragma once

#include <string>

#include "tokenway/tokenway.h"

namespace tw {

inline constexpr int kDtypes = twBool + 1;

// Bytes of one element; 0 if the value is no dtype.
int dtype_bytes(twDtype_t dtype);
const char* dtype_name(twDtype_t dtype);
// Its name and number, as sentences say it: "int64 (7)".
std::string dtype_text(twDtype_t dtype);
// Whether combine can sum this type.
bool is_summable(twDtype_t dtype);

}  // namespace tw
