"""Mutations of folds on the way between hosts of devices (src/cuda/step/fold.cu, src/cuda/transport/posted_folds.cc),
and of the kernels before and behind them."""

from mutation import Edit, Mutation

FOLD = "src/cuda/step/fold.cu"
POST = "src/cuda/step/post.cu"
HOST = "src/cuda/transport/posted_folds.cc"
SUMS = "src/cuda/combine/bias.cu"

AWAIT = "  await_ranks(g, step, Look::kSignal, [&](int rank) { return rank / f.local == g.me / f.local; });\n"
FOLDED = '  TW_RETURN_IF_FAILED(launched("folds for other hosts", launch_fold(f, step.blocks, step.stream)));\n'


def _folds(name: str, invariant: str, test: str, *edits: Edit) -> Mutation:
    return Mutation(name, invariant, "emulated-gin/folds", test, edits)


FOLDS = (
    _folds("a fold that waits for no mate", "S4", "test_a_slow_mate", Edit(FOLD, AWAIT, "")),
    _folds(
        "folds over ranks descending",
        "S9",
        "test_layouts and 8-4",
        Edit(FOLD, "places[found + __popc(all & below(lane()))]", "places[found + __popc(all & ~below(lane() + 1))]"),
    ),
    _folds(
        "tags of any step",
        "T3",
        "test_layouts",
        Edit(FOLD, "tag - make_tag(step.number, 0)", "tag % kSlots"),
    ),
    _folds(
        "a fold in the place of a row that was dropped",
        "S9",
        "test_rows_that_were_dropped",
        Edit(FOLD, "found.to.slot < static_cast<int>(unpack(load_word(signal)).n)", "signal != nullptr"),
    ),
    _folds(
        "folds of more tokens than an arena has tags for",
        "S10",
        "test_groups_that_share_a_window",
        Edit(HOST, "bound <= inboxes_.tokens && ", ""),
    ),
    _folds(
        "folds are posted before they are made",
        "T5",
        "test_folds_alone_are_posted",
        Edit(HOST, FOLDED, ""),
        Edit(
            HOST,
            '  return launched("the posts of folds", launch_post(p, step.stream));\n',
            '  TW_RETURN_IF_FAILED(launched("the posts of folds", launch_post(p, step.stream)));\n'
            '  return launched("folds for other hosts", launch_fold(f, step.blocks, step.stream));\n',
        ),
    ),
    _folds(
        "all partials of another domain are summed",
        "S9",
        "test_types",
        Edit(SUMS, "kFolds && by.folded != 0 ? firsts_of(by, s.me(), of, fold.domain) : of.there", "of.there"),
    ),
    _folds(
        "an owner waits for its folder first",
        "T9",
        "test_who_is_late",
        Edit(
            POST,
            "[&](int rank) { return !folds(rank); });\n"
            "  if (p.local > 0) await_ranks(g, step, Look::kSignal, folds);\n",
            "folds);\n  await_ranks(g, step, Look::kSignal, [&](int rank) { return !folds(rank); });\n",
        ),
    ),
)
