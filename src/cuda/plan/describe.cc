// Plans as text, for `tokenway info --plan`. Takes a group's configuration, a number of tokens and a device's SMs;
// gives lines of name, tab, value: what plan_dispatch and plan_combine say of the calls that most programs make, with
// rows in tensors that are contiguous and aligned.
//
// What breaks if this changes: what the command prints. No kernel and no group uses it.
#include <algorithm>
#include <cstdio>

#include "core/plan_query.h"
#include "cuda/plan/by_expert.h"
#include "cuda/plan/combine.h"
#include "cuda/plan/dispatch.h"

namespace tw::cuda {
namespace {

const char* name_of(Kind kind) {
  switch (kind) {
    case Kind::kGeneric:
      return "generic";
    case Kind::kUsual:
      return "usual";
    case Kind::kLowSm:
      return "low-SM";
    case Kind::kPackets:
      return "LL128 packets";
  }
  return "?";
}

class Text {
 public:
  explicit Text(std::string* text) : text_(text) {}
  void add(const char* step, const char* name, const std::string& value) {
    *text_ += std::string(step) + name + "\t" + value + "\n";
  }
  void add(const char* step, const char* name, int64_t value) { add(step, name, std::to_string(value)); }
  void add_work(const char* step, Kind kind, const Roles& roles, const Tiles& tiles, const WideTiles& wide) {
    add(step, "kernel", name_of(kind));
    add(step, "blocks that send", roles.sending);
    add(step, "blocks that receive", roles.receiving);
    add(step, "sends and receives in", roles.apart != 0 ? "blocks of their own" : "the same blocks");
    add(step, "tiles of a row", tiles.per_row.divisor);
    add(step, "rows in wider tiles", wide.parts > 1 ? wide.rows : 0);
    add(step, "tiles of such a row", wide.parts > 1 ? wide.per_row.divisor : 0);
  }

 private:
  std::string* text_;
};

void describe_dispatch(const Budget& budget, const Shape& shape, int32_t tokens, bool known, const char* step,
                       Text* text) {
  DispatchParams p{};
  GroupMarks marks;  // an exact layout's handle has some
  p.handle.marks = shape.exact() ? &marks : nullptr;
  p.tokens = tokens;
  p.bound = shape.default_bound();
  p.send = p.receive = 1;
  DispatchFacts facts;
  facts.words = dispatch_words(shape);
  facts.usual = is_usual(shape) && shape.top_k % 4 == 0;
  facts.metadata_known = known;
  for (int q = 0; q < shape.payloads; ++q) {
    const uint64_t bytes = shape.payload_bytes[q];
    facts.usual = facts.usual && bytes % 16 == 0;
    p.payloads[q].vectors = static_cast<uint32_t>(bytes / 16);
  }
  plan_dispatch(budget, shape, facts, &p);
  text->add_work(step, p.kind, p.roles, p.tiles, p.wide);
  text->add(step, "rows as LL128 packets", p.tokens - p.first_packet);
  text->add(step, "rehearses", p.rehearses != 0 ? "yes" : "no");
  if (shape.exact()) return;
  ByExpertParams straight{};
  straight.call = p;
  straight.call.at = DispatchScratch{};
  const ByExpertFacts wanted{true, false, 16, (shape.experts + shape.ranks - 1) / shape.ranks};
  const bool one = plan_by_expert(budget, shape, wanted, &straight);
  text->add(step, "rows by expert", one ? "by the same kernel" : "copied behind it");
  if (one) text->add(step, "blocks that receive them", straight.call.roles.receiving);
}

void describe_combine(const Budget& budget, const Shape& shape, twDtype_t dtype, int32_t tokens, const char* step,
                      Text* text) {
  CombineParams p{};
  p.tokens = tokens;
  p.bound = shape.default_bound();
  p.send = p.receive = 1;
  p.plain = 1;
  p.own_direct = shape.staged == 0;
  p.rows_dtype = p.wire_dtype = p.out_dtype = dtype;
  p.vectors_fit = p.sums_fit = shape.combine_bytes % 16 == 0;
  p.words_fit = p.word_sums_fit = shape.combine_bytes % 8 == 0;
  p.vectors = static_cast<uint32_t>(shape.combine_bytes / 16);
  plan_combine(budget, shape, {}, &p);
  text->add_work(step, p.kind, p.roles, p.tiles, p.wide);
  text->add(step, "rows as LL128 packets", p.kind == Kind::kPackets ? tokens : p.tail_packets);
  text->add(step, "chunks in a turn", p.turn_chunks);
  text->add(step, "rehearses", p.rehearses != 0 ? "yes" : "no");
}

}  // namespace
}  // namespace tw::cuda

namespace tw {

Status describe_plan(const GroupConfig& config, int32_t tokens, int32_t device_sms, int32_t sm_limit,
                     std::string* text) {
  const Shape& shape = config.shape();
  cuda::Budget all;
  TW_RETURN_IF_FAILED(cuda::make_budget({device_sms, 9}, shape, sm_limit, 1, shape.staged != 0, &all));
  const cuda::Budget budget = cuda::for_rows(all, shape);
  cuda::Text plan(text);
  plan.add("", "tuning", budget.tuning->gpu);
  plan.add("", "measured in", budget.tuning->source);
  plan.add("", "SMs of the device", budget.device_sms);
  plan.add("", "blocks of a kernel", budget.max_grid);
  plan.add("", "packet bound", shape.exact() ? 0 : budget.packet_tokens);
  const WindowMap slots = config.map.for_low_latency();
  const cuda::Budget low = cuda::for_rows(all, slots.shape());
  const bool both = shape.has_both_modes();
  if (both) plan.add("", "low latency up to", slots.shape().max_tokens);
  if (both) plan.add("", "its packet bound", low.packet_tokens);
  const twDtype_t dtype = config.given.combine_dtype;
  cuda::describe_dispatch(budget, shape, tokens, false, "dispatch: ", &plan);
  if (shape.exact()) cuda::describe_dispatch(budget, shape, tokens, true, "dispatch of a known routing: ", &plan);
  cuda::describe_combine(budget, shape, dtype, tokens, "combine: ", &plan);
  if (!both) return {};
  const int32_t few = std::min(tokens, slots.shape().max_tokens);
  cuda::describe_dispatch(low, slots.shape(), few, false, "dispatch of low latency: ", &plan);
  cuda::describe_combine(low, slots.shape(), dtype, few, "combine of low latency: ", &plan);
  return {};
}

}  // namespace tw
