// The table of types (dtypes.h). What sentences call a type is its name in Python too.
#include "core/dtypes.h"

namespace tw {
namespace {

struct DtypeInfo {
  const char* name;
  int bytes;
};

constexpr DtypeInfo kInfo[] = {
    {"none", 0},    {"uint8", 1},       {"int8", 1},        {"int16", 2},   {"uint16", 2},   {"int32", 4},
    {"uint32", 4},  {"int64", 8},       {"uint64", 8},      {"float16", 2}, {"bfloat16", 2}, {"float32", 4},
    {"float64", 8}, {"float8_e4m3", 1}, {"float8_e5m2", 1}, {"bool", 1},
};
static_assert(sizeof kInfo / sizeof kInfo[0] == kDtypes);

}  // namespace

int dtype_bytes(twDtype_t dtype) {
  return static_cast<int>(dtype) > 0 && static_cast<int>(dtype) < kDtypes ? kInfo[dtype].bytes : 0;
}

const char* dtype_name(twDtype_t dtype) {
  return static_cast<int>(dtype) >= 0 && static_cast<int>(dtype) < kDtypes ? kInfo[dtype].name : "unknown";
}

std::string dtype_text(twDtype_t dtype) {
  return std::string(dtype_name(dtype)) + " (" + std::to_string(static_cast<int>(dtype)) + ")";
}

bool is_summable(twDtype_t dtype) { return dtype == twFloat32 || dtype == twBfloat16 || dtype == twFloat16; }

}  // namespace tw
