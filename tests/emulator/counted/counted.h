// What kernels have stored at peers, over all ranks of this process.
#pragma once

#include <cstdint>

namespace tw::counted {

enum Kind { kBytes, kWords, kPairs, kKinds };  // of put_data, put_word and put_pair

void add(Kind kind, uint64_t by);

}  // namespace tw::counted
