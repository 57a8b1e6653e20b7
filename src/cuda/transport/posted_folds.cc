// What PostedTransport does with partials of a group that sums by domain, where domains are hosts: they are folded
// before they travel, by the rank of this host whose rail the owner has (launch/folds.h).
//
// What breaks if this changes: S10. Whether a step is folded, and where messages lie, must follow from what all ranks
// have alike.
#include "cuda/transport/posted.h"

namespace tw::cuda {

// From some bytes of partials for a rank on. Folded combines of 128, 1024 and 4096 tokens took 48, 93 and 226 us longer
// where the network has no limit (2x H200, two ranks on each, bench/results/gin-folds-2-gpus.json), in which a link of
// 50 GB/s carries 2.4, 4.7 and 11 MB. A host of two saves 0.8 of the bytes of its partials for a rank, one of eight 2.2
// of them.
bool PostedTransport::folds(const Domains& domains, const Blocks& blocks) const {
  constexpr uint64_t kWorth = 2 << 20;  // not measured over a network
  const Region& region = blocks.regions.front();
  if (!inboxes_.uses.folds || !topology_.divides_into(domains.size) || region.row == 0) return false;
  const uint64_t bound = region.bytes / region.row;  // of a group in an arena, perhaps more than its maker's
  const uint64_t end = inboxes_.rows_at(bound) + InboxMap::align(region.bytes);
  return bound <= inboxes_.tokens && end <= inboxes_.message && are_worth_it(region.bytes, kWorth);
}

// post: of the step's blocks.
FoldParams PostedTransport::place_folds(const PostParams& post, const MovedStep& step, const Blocks& blocks) const {
  const Region& partials = blocks.regions.front();
  const auto bound = static_cast<int32_t>(partials.bytes / partials.row);
  const int channel = step.at.channel;
  FoldParams f{};
  f.post = post;
  f.post.once = host_rows(channel);
  f.post.once.bound = bound;
  f.post.regions[0].in_message = inboxes_.rows_at(static_cast<uint64_t>(bound));
  f.post.sent = blocks.sent;
  f.returned = blocks.returned;
  f.partials = {out_.table, post.regions[0].from.offset};
  const uint64_t tags = posts_.outgoing_bytes() + inboxes_.tags_at(channel);
  f.tags = out_.data() + tags;
  f.near_tags = {out_.table, tags};
  f.tags_bank = inboxes_.tags_bank();
  f.tokens = static_cast<int32_t>(inboxes_.tokens);
  f.local = topology_.most_local();
  return f;
}

// Ranks of this host wait for each other here, so each is told before anybody folds; and so are the owners for whom
// others fold, who then know that it is not this rank that is late.
Status PostedTransport::post_folds(const PostParams& post, const MovedStep& step, const Blocks& blocks) const {
  FoldParams f = place_folds(post, step, blocks);
  PostParams& p = f.post;
  p.sent.tokens = p.once.bound;  // of a list
  TW_RETURN_IF_FAILED(launched("tags of partials", launch_tags(f, step.blocks, step.stream)));
  p.served = Served::kOthers;
  TW_RETURN_IF_FAILED(launched("the posts of a step", launch_post(p, step.stream)));
  TW_RETURN_IF_FAILED(launched("folds for other hosts", launch_fold(f, step.blocks, step.stream)));
  p.served = Served::kOwners;
  return launched("the posts of folds", launch_post(p, step.stream));
}

}  // namespace tw::cuda
