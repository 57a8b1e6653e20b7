// The table of measured numbers, and the choice of its row: tuning.h tells what each number is.
//
// What breaks if a number changes: speed alone. Every number here needs a record in bench/results/ (`source`); each
// comment says what the number's neighbours cost, in us for rows of 7168 bfloat16.
#include "cuda/plan/tuning.h"

#include <cstdlib>
#include <iterator>

namespace tw::cuda {
namespace {

// All were measured between two ranks; with four, the same numbers were the best of those tried
// (bench/results/nvlink-4-gpus.json). A comment says what a number's neighbours cost, in us for rows of 7168 bfloat16.
constexpr Tuning kTunings[] = {
    {
        .gpu = "H100 and H200 SXM, NV18",
        .sms = 132,
        .ranks = 1 << 12,
        .source = "nvlink-2-gpus.json, nvlink-flat-24-sms.json, nvlink-backward.json",
        // A quarter fills the link; with more, tiles at the end wait longer behind each other.
        .dispatch_sends = 25,
        .dispatch_sends_exact = 26,
        // 4096 tokens of fp8 with their scales took 109 with a quarter, 97 with a third.
        .dispatch_sends_payloads = 33,
        // 4096 tokens took 166.4 with 44 of 132 SMs and narrow tiles at the end; with 34, usual tiles and 128 packets
        // they took 167.5. Rows with scales took 0.6 % longer with 44, and 1 % longer with fewer SMs to receive than to
        // send.
        .dispatch_sends_known = 34,
        .dispatch_sends_most = 80,
        // With half of the SMs sending, 512 tokens took 57 there and back instead of 52.
        .packet_dispatch_sends = 30,
        .dispatch_tail = 192,
        .dispatch_tail_known = 128,
        .dispatch_tail_narrow = 64,
        .narrow_rows = 64,
        .combine_sends = 36,
        .combine_sends_most = 42,
        .packet_combine_sends = 20,
        .packet_combine_sends_summed = 50,
        // 4096 tokens took 110.6 with this, 120.4 with 75 %; 128 took 13.4 and 12.9. With half of the blocks, in a
        // kernel that with this took 111.1, they took 123.7. On 4 GPUs, where an older kernel took 262 with 75 % and
        // 279 with 62 %, it has not been tried since.
        .fp8_combine_sends = 60,
        // Between two ranks 4096 tokens took 675 with half of the blocks, 804 with 35 % and 682 with 65 %.
        .choices_sends = 50,
        .combine_tail = 64,
        .least_tail = 32,
        // By 24 SMs 4096 tokens took 180 with 100 rows, and 181 with 80 and with 160.
        .turn_rows_low_sm = 104,
        // By 64 SMs 4096 tokens took 171 with 52 and with 78, 175 with 104; by 96 SMs 2048 took 93 with 40, 99 with 80.
        .turn_rows = 80,
        .turn_rows_share = 28,
        // Where rows are no packets, a third fills the link.
        .collective_sends = 30,
        .collective_sends_most = 50,
        .packet_collective_sends = 50,
        // Between two ranks of one GPU 32 rows took 6.7 with this instead of 7.3, and 128 took 8.2 instead of 9.2; but
        // 512 took 35 instead of 28, as half of the SMs did the work then.
        .own_by_senders = 128,
        // A dispatch of 4096 tokens by 24 SMs took 189 with whole rows, 185 with halves, which this number gives, and
        // 196 with quarters.
        .low_sm_tiles = 16,
        // With 2 KB to a tile, as where rows are only moved, a combine of 4096 tokens took 640 between two ranks of one
        // device; with this number it took 472.
        .summed_tiles = 2,
        // A reduce of 1 row took 3.8 with this, 4.2 with 30 blocks to a side; but a dispatch of 8 rows took 4.28 with
        // this, 4.13 with 33 blocks.
        .busy = 4,
    },
};

}  // namespace

const Tuning& tuning_of(int sms, int ranks) {
  const Tuning* best = nullptr;
  for (const Tuning& row : kTunings) {
    if (ranks > row.ranks) continue;
    const bool nearer = best == nullptr || std::abs(row.sms - sms) < std::abs(best->sms - sms) ||
                        (row.sms == best->sms && row.ranks < best->ranks);
    if (nearer) best = &row;
  }
  return best != nullptr ? *best : kTunings[std::size(kTunings) - 1];
}

}  // namespace tw::cuda
