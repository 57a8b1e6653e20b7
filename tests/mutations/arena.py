"""Mutations of groups that share a window: one sequence of steps, banks that coincide, and how a group leaves."""

from mutation import GROUP, MAP, NOTES, Edit, Mutation

ARENA = "src/core/arena.cc"
GROUP_H = "src/core/group.h"

ARENA_MUTATIONS = (
    Mutation(
        "a group in another's window counts steps of its own",
        "S1",
        "arena_test",
        "Arena.StepsAreOneSequence",
        (Edit(GROUP_H, "  tw::Channels& channels;  // the arena's\n", "  tw::Channels channels;\n"),),
    ),
    Mutation(
        "calls of groups that share a window look alike",
        "S10",
        "arena_test",
        "Arena.CallsOfTwoGroupsDoNotMeet",
        (Edit(NOTES, "return growth_digest((1u << 16) + call);", "return call & 0;"),),
    ),
    Mutation(
        "banks of a group in another's window lie across its banks",
        "S2",
        "arena_test",
        "Arena.BanksOfAllMapsCoincide",
        (Edit(MAP, "    map.bank_bytes_ = arena.bank_bytes_;\n", ""),),
    ),
    Mutation(
        "peers of another group write where a view is unpacked",
        "S3",
        "arena_test",
        "Arena.BanksOfAllMapsCoincide",
        (Edit(MAP, "    map.unpacked_at_ = arena.unpacked_at_;\n", ""),),
    ),
    Mutation(
        "packets of a bank lie across those of the other",
        "S2",
        "arena_test",
        "Arena.BanksOfAllMapsCoincide",
        (Edit(MAP, "    map.packets_bytes_ = arena.packets_bytes_;\n", ""),),
    ),
    Mutation(
        "chunk signals of a bank lie across those of the other",
        "S2",
        "arena_test",
        "Arena.BanksOfAllMapsCoincide",
        (Edit(MAP, "    map.chunks_bytes_ = arena.chunks_bytes_;\n", ""),),
    ),
    Mutation(
        "a group that ends leaves its steps to nobody",
        "S2",
        "arena_test",
        "Arena.AGroupThatEndsLeavesItsLanes",
        (Edit(GROUP, "  if (group->shares() && !group->is_sticky()) end_steps(*group);\n", ""),),
    ),
    Mutation(
        "groups count loads in one place",
        "S10",
        "arena_test",
        "Arena.LoadStatisticsLieApart",
        (Edit(ARENA, "  config->loads = at;\n", ""),),
    ),
    Mutation(
        "a turn for each group of a window",
        "S5",
        "arena_test",
        "Arena.TheTurnIsOfAllGroups",
        (Edit("src/api/registry.h", "turn->take(group.arena->occupied, call", "turn->take(group.occupied, call"),),
    ),
)
