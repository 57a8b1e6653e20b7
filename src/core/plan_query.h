// What twDescribePlan asks of a backend that plans launches. Here, as core knows backends by what they promise alone.
#pragma once

#include <string>

#include "core/config.h"

namespace tw {

// src/cuda/plan. Lines of a name, a tab and a value. twInvalidArgument if the group's channels do not fit on the
// device.
Status describe_plan(const GroupConfig& config, int32_t tokens, int32_t device_sms, int32_t sm_limit,
                     std::string* text);

}  // namespace tw
