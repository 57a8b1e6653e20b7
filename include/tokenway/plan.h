// Plans of the CUDA backend: how it would run a step, which kernels, how many SMs send, how wide tiles are. They are
// for people and tools that ask why a step is as fast as it is; no call depends on them. Needs no device, and works in
// builds without CUDA.
#ifndef TOKENWAY_PLAN_H_
#define TOKENWAY_PLAN_H_

#include "tokenway/types.h"

#ifdef __cplusplus
extern "C" {
#endif

// What twDescribePlan is asked about.
typedef struct {
  size_t size;
  int32_t tokens;  // tokens of each rank in the step, from 0 to config.max_tokens; -1, the default: config.max_tokens
  int32_t device_sms;  // SMs of each rank's device; 0, the default: 132, as H100 and H200 SXM have
} twPlanQuery_t;

#define TW_PLAN_QUERY_INIT {sizeof(twPlanQuery_t), -1, 0}

// Writes the plan of a dispatch and a combine of contiguous, 16-byte aligned tensors as text: each line is a name, a
// tab and a value, and names are unique. Writes at most `capacity` bytes with the terminating zero, and to *needed how
// many bytes the whole text takes. `text` may be NULL if `capacity` is 0. Errors: as twGroupCreate for the
// configuration; twInvalidArgument for a query out of range, or more channels (config.lanes) than SMs.
TW_API twResult_t twDescribePlan(const twGroupConfig_t* config, int32_t nranks, const twPlanQuery_t* query, char* text,
                                 size_t capacity, size_t* needed);

#ifdef __cplusplus
}
#endif

#endif  // TOKENWAY_PLAN_H_
