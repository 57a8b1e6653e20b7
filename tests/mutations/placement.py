"""Mutations of experts in several slots: which slot, what ranks must have alike, and what is counted."""

from mutation import CPU, CPU_LOADS, ENTRIES, LOADS_H, REPLICAS, Edit, Mutation

COUNT = (
    "  if (group.shape().counts_loads != 0) tw::count_choices(group.shape(), handle->routing, handle->map.choices);\n"
)

PLACEMENT = (
    Mutation(
        "maps that differ are not noted",
        "S9",
        "replicas_test",
        "Replicas.RanksThatDifferAreTold",
        (
            Edit(
                CPU,
                "mix_counted(handle.map.digest, call.counted)",
                "0",
            ),
        ),
    ),
    Mutation(
        "all ranks begin with the same slot",
        "S9",
        "replicas_test",
        "Replicas.InTurn",
        (
            Edit(
                REPLICAS,
                "(static_cast<uint32_t>(rank) + static_cast<uint32_t>(token)) % among",
                "static_cast<uint32_t>(token) % among",
            ),
        ),
    ),
    Mutation(
        "what is left over goes to the first slot on all ranks",
        "S9",
        "replicas_test",
        "Replicas.WhatIsLeftGoesElsewhereOnEachRank",
        (
            Edit(
                REPLICAS,
                "(static_cast<uint32_t>(replicas.rank) + static_cast<uint32_t>(expert)) % static_cast<uint32_t>(among)",
                "0u",
            ),
        ),
    ),
    Mutation(
        "a level that forgets what an expert had",
        "S9",
        "replicas_test",
        "Replicas.QuotasAddUpAndLevel",
        (Edit(REPLICAS, "j < end && round > 0; ++j", "j < begin && round > 0; ++j"),),
    ),
    Mutation(
        "what the other bank was told is counted",
        "S1",
        "replicas_test",
        "Loads.AllRanksAlike",
        (
            Edit(
                CPU_LOADS,
                "transport.local(place(call.at, source))",
                "transport.local(place({call.at.channel, call.at.step + 1}, source))",
            ),
        ),
    ),
    Mutation(
        "a pass that is not to be counted is",
        "S9",
        "replicas_test",
        "Loads.AllRanksAlike",
        (Edit(CPU_LOADS, "if (!counts() || !call.counted) return;", "if (!counts()) return;"),),
    ),
    Mutation(
        "slots are counted as if they were experts",
        "S9",
        "replicas_test",
        "Loads.AllRanksAlike",
        (
            Edit(ENTRIES, COUNT, ""),
            Edit(ENTRIES, "  tw::assign_slots(group.shape(),", COUNT + "  tw::assign_slots(group.shape(),"),
        ),
    ),
    Mutation(
        "what a channel has counted long ago stays as it was",
        "S9",
        "replicas_test",
        "Loads.ChannelsThatStandStillAge",
        (Edit(LOADS_H, "  return load * left;", "  return load;"),),
    ),
)
