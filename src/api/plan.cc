// The entry point twDescribePlan: checks a configuration and a query, and copies the text that the CUDA backend's
// planner gives (core/plan_query.h) into the caller's memory, with its terminating zero. Needs no device. No call
// depends on it: only tools and people read it.
#include "core/plan_query.h"

#include <algorithm>

#include "api/check.h"
#include "api/enter.h"
#include "core/env.h"

using tw::Argument;
using tw::fail;
using tw::Status;
using tw::Value;
using tw::api::enter;

twResult_t twDescribePlan(const twGroupConfig_t* given, int32_t nranks, const twPlanQuery_t* query, char* text,
                          size_t capacity, size_t* needed) {
  return enter([&]() -> Status {
    TW_RETURN_IF_FAILED(tw::api::check_ranks(nranks));
    tw::api::ReadConfig known;
    TW_RETURN_IF_FAILED(tw::api::read_config(given, &known));
    twPlanQuery_t asked = TW_PLAN_QUERY_INIT;
    TW_RETURN_IF_FAILED(tw::api::read_struct("query", query, &asked));
    if (text == nullptr && capacity > 0) {
      return fail(twInvalidArgument, "{} is NULL, but {} is {}", Argument("text"), Argument("capacity"),
                  Value(capacity));
    }
    if (needed == nullptr) return fail(twInvalidArgument, "{} is NULL", Argument("needed"));
    tw::Environment environment;
    TW_RETURN_IF_FAILED(tw::read_environment(&environment));
    tw::GroupConfig config;
    TW_RETURN_IF_FAILED(tw::check_config(known.config, nranks, true, environment, &config));
    const int32_t most = config.given.max_tokens;
    if (asked.tokens < -1 || asked.tokens > most) {
      return fail(twInvalidArgument, "{} is {}; it must be from 0 to {}, {}, or -1 for that", Argument("query.tokens"),
                  Value(asked.tokens), Argument("config.max_tokens"), most);
    }
    constexpr int32_t kMostSms = 1024;
    if (asked.device_sms < 0 || asked.device_sms > kMostSms) {
      return fail(twInvalidArgument, "{} is {}; it must be from 1 to {}, or 0 for 132", Argument("query.device_sms"),
                  Value(asked.device_sms), kMostSms);
    }
    constexpr int32_t kUsualSms = 132;  // H100 and H200 SXM
    std::string plan;
    TW_RETURN_IF_FAILED(tw::describe_plan(config, asked.tokens < 0 ? most : asked.tokens,
                                          asked.device_sms > 0 ? asked.device_sms : kUsualSms, config.given.sm_limit,
                                          &plan));
    *needed = plan.size() + 1;
    if (capacity > 0) {
      const size_t written = std::min(capacity - 1, plan.size());
      std::copy_n(plan.data(), written, text);
      text[written] = 0;
    }
    return {};
  });
}
