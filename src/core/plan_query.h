// What twDescribePlan asks of a backend that plans launches: a configuration and a number of tokens in, a text out. It
// stands here because core knows backends by what they promise alone; src/cuda/plan implements it. No call depends on
// it: it describes what is about speed alone.
#pragma once

#include <string>

#include "core/config.h"

namespace tw {

// Describes the plan of a dispatch and a combine (src/cuda/plan), in lines of a name, a tab and a value.
// twInvalidArgument if the group's channels do not fit on the device.
Status describe_plan(const GroupConfig& config, int32_t tokens, int32_t device_sms, int32_t sm_limit,
                     std::string* text);

}  // namespace tw
