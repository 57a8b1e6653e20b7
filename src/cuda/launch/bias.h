// Sums that start from rows of the caller (twCombineInput_t.bias), and sums by domain (twGroupConfig_t.domain): what
// their kernels take by value, and the launches.
//
// Rows are sent as ever, by the kernels of any combine. These kernels are the other half of the step, which waits and
// sums. They are apart, so that those of other combines keep their parameters: 40 bytes more took a pair of one token
// 1.4 % longer.
//
// What breaks if this changes: `call` must be as for the launch that sent, but with `receive` alone: owner and senders
// agree by it where rows are (S4, S10).
#pragma once

#include "cuda/launch/choices.h"
#include "cuda/launch/combine.h"
#include "exchange/domains.h"

namespace tw::cuda {

struct BiasRows {
  const std::byte* rows;  // the one of the first token that is summed here
  int64_t stride;
  twDtype_t dtype;
  int32_t vectors_fit;  // rows begin at multiples of 16 bytes
};

// Of combines per rank and per expert: the map's shape says which it is. Per rank `call` is a combine without weights.
struct BiasParams {
  ChoicesParams call;
  BiasRows bias;
};
// How sums are by domain.
struct ByDomain {
  Domains domains;
  int32_t folded;  // 1: partials of another domain than this rank's have come as one, the first's (launch/folds.h)
};
// Of combines per rank, with or without a bias: rows NULL.
struct DomainParams {
  BiasParams sums;
  ByDomain by;
};
struct Fp8BiasParams {
  Fp8Params call;
  BiasRows bias;
};

// Launch the blocks of the combine's roles. A cudaError_t comes back as int.
int launch_bias(const BiasParams& params, void* stream);
int launch_domains(const DomainParams& params, void* stream);
int launch_fp8_bias(const Fp8BiasParams& params, void* stream);

}  // namespace tw::cuda
