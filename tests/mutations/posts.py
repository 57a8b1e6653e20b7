"""Mutations of what kernels post between hosts (src/cuda/transport/posted.cc, src/cuda/step/post.cu, pull.cu), and of
what puts it together (src/cuda/view/staged.cu)."""

from mutation import Edit, Mutation

POST = "src/cuda/step/post.cu"
PULL = "src/cuda/step/pull.cu"
POSTED = "src/cuda/transport/posted.cc"
LANDED = "src/cuda/view/staged.cu"
APART = "src/cuda/host/control_apart.cc"

TOLD = "    if (threadIdx.x == 0) tell(g, p.net, p.signals, p.channel, rank, pack(told));\n"
REGIONS = "  for (int i = 0; i < p.count; ++i) {\n    const PostRegion& region = p.regions[i];\n    if (message"
MESSAGE = "    put_message(p, bank, message, told);\n"
NOTE = """  net_put(net, channel, rank, beyond(to, kNoteOffset), beyond(signals.from, here + kNoteOffset),
          kRowsOffset + sizeof(uint64_t) - kNoteOffset);
"""


def _posts(name: str, invariant: str, unit: str, test: str, *edits: Edit) -> Mutation:
    return Mutation(name, invariant, f"emulated-gin/{unit}", test, edits)


POSTS = (
    _posts(
        "a posted word before its rows",
        "T5",
        "posts",
        "test_rows_alone_are_posted",
        Edit(POST, REGIONS, f"  if (!near) {{\n{TOLD}  }}\n{REGIONS}"),
        Edit(POST, f"  if (!near) {{\n{TOLD}    return;\n", "  if (!near) {\n    return;\n"),
    ),
    _posts(
        "posted words remember no bank",
        "T6",
        "posts",
        "test_rows_alone_are_posted",
        Edit(POST, "signals.told[ranks * bank + rank]", "signals.told[rank]"),
    ),
    _posts(
        "posts from one bank of what goes out",
        "T3",
        "exchange",
        "test_sizes_change",
        Edit(
            POST,
            "const uint64_t here = block_here(region, bank, rank);",
            "const uint64_t here = block_here(region, 0, rank);",
        ),
    ),
    _posts(
        "a step that is none is waited for",
        "S6",
        "posts",
        "test_a_combine_of_a_dispatch_that_failed",
        Edit(POST, "is_sticky(g) || !is_made(own, step.number)", "is_sticky(g) || own.step == ~0u"),
    ),
    _posts(
        "posts lack the last row",
        "S4",
        "posts",
        "test_rows_alone_are_posted",
        Edit(POST, "min(region.row * told.n, region.block)", "min(region.row * (told.n - (told.n > 0)), region.block)"),
    ),
    _posts(
        "posted words without a note",
        "T8",
        "posts",
        "test_rows_alone_are_posted",
        Edit(POST, NOTE, ""),
    ),
    _posts(
        "a step that is left out is not posted",
        "S2",
        "posts",
        "test_counts_and_the_rows",
        Edit(
            POST,
            "    tell(g, p.net, p.signals, p.channel, rank, signal);\n",
            "",
        ),
    ),
    _posts(
        "a message behind its word",
        "T5",
        "posts",
        "test_rows_alone_are_posted",
        Edit(POST, MESSAGE, ""),
        Edit(
            POST,
            f"{TOLD}    return;\n",
            f"{TOLD}    if (threadIdx.x == 0 && message >= 0) {{\n{MESSAGE}    }}\n    return;\n",
        ),
    ),
    _posts(
        "a message whose keeper is not waited for",
        "T5",
        "crossing",
        "test_puts_to_one_rank_that_come_late",
        Edit(PULL, "reached(unpack(signal).step, step.low())", "signal != ~0ull"),
    ),
    _posts(
        "rows of a message by another rank's list",
        "S10",
        "crossing",
        "test_puts_to_one_rank_that_come_late",
        Edit(PULL, "p.once.ranks[g.me].rail", "0"),
    ),
    _posts(
        "a row in a message for each rank",
        "S9",
        "posts",
        "test_rows_alone_are_posted",
        Edit(
            PULL,
            "way.route.message == message; });",
            "way.to.rank == token.from(lead, token.ways[0].to.rank, token.ways[1].to.rank); });",
        ),
    ),
    _posts(
        "trials of a network are not looked at",
        "T5",
        "crossing",
        "test_a_network_whose_writes",
        Edit(PULL, "__syncthreads_or(wrong) != 0 && threadIdx.x == 0", "__syncthreads_or(wrong) < 0"),
    ),
    _posts(
        "rows that arrive elsewhere are posted into the window",
        "S9",
        "throughput",
        "test_ranks",
        Edit(POSTED, "blocks.land ? NetPlace{arrivals_.number, to} : in_window(to)", "in_window(to)"),
    ),
    _posts(
        "rows that arrived lack the end of their metadata",
        "S9",
        "window_images",
        "high_throughput-per_rank",
        Edit(
            LANDED,
            "bank + map.meta_begin() + to * meta, meta, rows, to)",
            "bank + map.meta_begin() + to * meta, meta - 1, rows, to)",
        ),
    ),
    _posts(
        "a network that fails asks nobody",
        "T9",
        "network_failures",
        "test_a_network_that_fails_with_a_rank",
        Edit(APART, "  if (!settled) judge(answers);\n", "  (void)settled;\n"),
    ),
    _posts(
        "a rank whose network fails blames itself though others' have failed",
        "T9",
        "network_failures",
        "test_networks_that_fail_while_all_answer",
        Edit(APART, "std::ranges::count_if(answers, goes) + 1 == std::ssize(answers)", "std::ssize(answers) > 1"),
    ),
    _posts(
        "a rank whose network fails blames a peer that answers",
        "T9",
        "network_failures",
        "test_a_network_that_fails_alone",
        Edit(APART, "alone ? me_ : -1;", "alone ? (me_ == 0 ? 1 : 0) : -1;"),
    ),
    _posts(
        "a timeout at which nobody is asked",
        "T9",
        "network_failures",
        "test_a_rank_that_waits_on_another_lane",
        Edit(APART, "steps(rank) < steps(me_) && steps(rank) < steps(culprit)", "steps(rank) < 0"),
    ),
)
