// Gathers and reduces on a device, as the host sees them: calls into kernel parameters.
#include <algorithm>

#include "nvlink/backend.h"
#include "nvlink/units.h"

namespace tw::nvlink {

namespace {

// Rows up to which those who send a gather's lines also put this rank's own where they belong. Between two ranks of one
// GPU 32 rows took 6.7 us instead of 7.3 so, and 128 took 8.2 instead of 9.2; but 512 took 35 instead of 28, as half of
// the SMs did it then.
constexpr int kOwnSent = 128;

// A tensor, and what its places allow.
CollectiveRows rows_of(const CollectiveCall& call, int q) {
  const CollectiveTensor& tensor = call.tensors[q];
  CollectiveRows rows{};
  rows.in = tensor.in;
  rows.block_stride = tensor.block_stride;
  rows.row_stride = tensor.row_stride;
  rows.out = tensor.out;
  rows.out_stride = tensor.out_stride;
  rows.begin = call.places.begin[q];
  rows.row_bytes = static_cast<uint32_t>(call.places.row_bytes[q]);
  rows.elements = static_cast<uint32_t>(tensor.elements);
  rows.from = tensor.from;
  rows.to = tensor.to;
  constexpr uint32_t kPart = 16 * kPushedVectors;
  rows.parts = (rows.row_bytes + kPart - 1) / kPart;
  rows.width = width_of({address_of(tensor.in), static_cast<uint64_t>(tensor.block_stride),
                         static_cast<uint64_t>(tensor.row_stride), address_of(tensor.out),
                         static_cast<uint64_t>(tensor.out_stride), rows.row_bytes});
  return rows;
}

}  // namespace

// How the rows travel: ranks must find the same, so by what they have alike. Beside it, who does what.
void NvlinkBackend::share_out(const CollectiveCall& call, CollectiveParams* p) const {
  uint64_t words = 0;
  uint64_t row_bytes = 0;
  for (int q = 0; q < p->tensors; ++q) {
    p->rows[q].first_word = static_cast<uint32_t>(words);
    words += words_of(p->rows[q].row_bytes);
    row_bytes += p->rows[q].row_bytes;
    p->pushed_parts += static_cast<int32_t>(p->rows[q].parts);
  }
  const uint64_t line_row = kLineBytes * lines_of(words);
  // The lines of a group are where they are whatever a step has in them (S10): a flag is never another line's data.
  const uint64_t room = static_cast<uint64_t>(view_.line_tokens) * context_.map.line_row();
  const bool lines = shape().ranks > 1 && view_.line_tokens > 0 && static_cast<uint64_t>(call.bound) * line_row <= room;
  p->by_lines = lines;
  p->lines = LinesAt::make(context_.map, call.at.lane);
  p->lines.row = static_cast<uint32_t>(line_row);
  // Not more chunks than there are words for them.
  p->chunk_rows = std::max(chunk_rows_of(row_bytes), shape().chunk_rows);
  p->turn_chunks = 1;
  p->drawn = turns_ahead(p->chunk_rows * p->pushed_parts);
  const CollectiveRows& first = p->rows[0];
  const bool same = !call.reduces || first.from == first.to;
  p->usual = p->tensors == 1 && same && first.width >= (lines ? 8 : 16);
  for (int q = 0; q < p->tensors; ++q) p->rows[q].width = p->rows[q].width == 16 ? 16 : p->rows[q].width >= 4 ? 4 : 1;

  const bool seen = call.views && !lines;  // the words alone say that rows are there
  p->late_word = call.in_window || seen;
  p->own_pushed = call.in_window || seen || carriage_ != nullptr;
  const bool known = call.all_sizes || !call.flat;  // where its own rows belong
  const bool few = lines && call.bound <= kOwnSent;
  p->own_sent = few && !call.reduces && p->send && p->receive && !p->own_pushed && known;
  const bool others = lines && (call.reduces ? !p->own_pushed : p->own_sent);  // alone are waited for
  const int64_t rows = static_cast<int64_t>(shape().ranks - (others ? 1 : 0)) * call.bound;
  p->units = units_of(words, 0, lines && call.bound <= kFewTokens ? 0 : call.bound, int64_t{max_grid_} * kWarps / 2);
  const bool both = p->send && p->receive;
  // Beyond lines: a third of the SMs fills the link.
  p->roles = lines ? line_roles(rows, p->units, both, 50, kWarps)
                   : roles_of(rows * p->pushed_parts, p->units, both, bulk_senders(30, 50));
}

Status NvlinkBackend::run_collective(const CollectiveCall& call, bool send, bool receive) {
  const OnDevice on(device_);
  remember(call.stream);
  CollectiveParams p{};
  p.at = collective_;
  p.group = view_at(call.at, !call.send_only);
  p.lane = call.at.lane;
  p.bank = call.views || carriage_ != nullptr ? call.at.bank() : -1;
  p.bound = call.bound;
  p.send = send;
  p.receive = receive;
  p.reduces = call.reduces;
  p.flat = call.flat;
  p.tensors = call.places.tensors;
  p.digest = call.digest;
  p.all_sizes = call.all_sizes;
  p.wide_sizes = call.wide_sizes;
  p.sizes_at = call.sizes_at;
  p.counts = call.counts;
  p.offsets = call.offsets;
  std::copy(call.sizes.begin(), call.sizes.end(), p.sizes);
  for (int q = 0; q < p.tensors; ++q) p.rows[q] = rows_of(call, q);
  share_out(call, &p);
  const bool early = early_ && captures(call.stream);
  const auto launch = call.reduces ? launch_reduce : launch_gather;
  return launched(call.reduces ? "a reduce-scatter" : "a gather", launch(p, p.roles.grid(), early, call.stream));
}

}  // namespace tw::nvlink
