"""Mutations of dispatches that put rows straight to their experts."""

from mutation import Edit, Mutation

PLAN = "src/cuda/plan/by_expert.cc"
LAUNCH = "src/cuda/launch/by_expert.h"
UNIT = "plan_test"
STRAIGHT = "Plan.RowsGoStraightToTheirExperts"
COPIED = "Plan.RowsThatAreCopiedToTheirExperts"

STRAIGHT_MUTATIONS = (
    Mutation(
        "columns written as rows",
        "bits",
        UNIT,
        COPIED,
        (Edit(PLAN, "!facts.by_expert || facts.columns ||", "!facts.by_expert ||"),),
    ),
    Mutation(
        "rows put straight to experts where every block sends and receives",
        "S7",
        UNIT,
        COPIED,
        (Edit(PLAN, "p.receive != 0 && p.roles.apart != 0;", "p.receive != 0;"),),
    ),
    Mutation(
        "no bit for an expert's last rows",
        "S9",
        UNIT,
        STRAIGHT,
        (Edit(LAUNCH, "at.words = (slots + 31) / 32;", "at.words = slots / 32;"),),
    ),
    Mutation(
        "an expert's sum lies among the next one's bits",
        "S9",
        UNIT,
        STRAIGHT,
        (Edit(LAUNCH, "at.pitch = (at.words + 1) | 1;", "at.pitch = at.words | 1;"),),
    ),
    Mutation(
        "a row's last tile is nobody's",
        "S4",
        UNIT,
        STRAIGHT,
        (
            Edit(
                PLAN,
                "Divider::make(std::max(p.tiles.per_row.divisor, 2u) - 1)",
                "Divider::make(std::max(p.tiles.per_row.divisor, 2u))",
            ),
        ),
    ),
)
