// Combines per expert on a device, as the host sees them: what their kernels have beside those of combines per rank,
// and their launches.
//
// Takes a CombineCall and the parameters that run_combine has filled in; gives launches on its stream.
//
// What breaks if this changes: whether rows go as packets must follow from what all ranks have alike (S10), and all
// rows must be sent before sums overwrite them.
#include "cuda/launch/choices.h"

#include <algorithm>

#include "cuda/host/backend.h"
#include "cuda/plan/combine.h"

namespace tw::cuda {
namespace {

int launch(const ChoicesParams& params, bool early, void* stream) {
  return params.packets != 0 ? launch_choice_packets(params, early, stream)
                             : launch_choices_bulk(params, early, stream);
}

}  // namespace

Status NvlinkBackend::run_choices(const CombineCall& call, const Budget& budget, const CombineParams& params,
                                  bool early) {
  const Shape& rows = call.sent.map.shape();
  ChoicesParams c{};
  c.call = params;
  c.call.weighted = 0;  // rows travel as they are
  c.call.plain = 0;
  c.call.own_direct = 0;
  c.weights = call.weights.data;
  c.weight_stride = call.weights.stride;
  const int32_t most = std::min(c.call.group.packet_tokens, kMostChoicePackets);
  c.packets = staged_ == nullptr && call.parts == 1 && most > 0 && call.bound <= most ? 1 : 0;
  const bool alone = sums_alone(call);
  const bool twice = c.call.send != 0 && c.call.receive != 0 && (alone || (!call.apart && !call.in_window));
  plan_choices(budget, rows, c.packets != 0, !twice, &c.call);
  if (twice) {
    c.call.receive = 0;
    TW_RETURN_IF_FAILED(launched("a combine per expert", launch(c, early, call.stream)));
    c.call.send = 0;
    c.call.receive = 1;
  }
  if (alone && c.call.receive != 0) return run_sums(call, c);
  return launched("a combine per expert", launch(c, early, call.stream));
}

}  // namespace tw::cuda
