"""Mutations of the leases behind a refused dispatch, of which peers of devices learn late."""

from mutation import CALLS, CHANNELS, Edit, Mutation

REFUSED = (
    Mutation(
        "the end of a lease leaves a channel where its steps have led",
        "S5",
        "device_side_test",
        "DeviceSide.LeasesLeaveTheirChannelsAlike",
        (Edit(CHANNELS, "    state.odd = state.odd_after.value_or(state.odd);\n", ""),),
    ),
    Mutation(
        "a combine without a lease takes its turn as a dispatch does",
        "S5",
        "device_side_test",
        "DeviceSide.LeasesLeaveTheirChannelsAlike",
        (
            Edit(
                CHANNELS,
                "  int lend(int of_dispatch) const {\n",
                "  int lend(int of_dispatch) {\n    take(of_dispatch + 1 < size() ? of_dispatch + 1 : 0);\n",
            ),
        ),
    ),
    Mutation(
        "a rank that was refused a dispatch keeps the lane in the combine",
        "S5",
        "device_side_test",
        "PretendedGroup.LeasesOfRefusedDispatches",
        (Edit(CALLS, "  give_back(group, handle);  // as at the peers, who think that it went well\n", ""),),
    ),
    Mutation(
        "a lease of a refused dispatch is taken from rows of a later one",
        "S5",
        "device_side_test",
        "PretendedGroup.LeasesOfRefusedDispatches",
        (Edit(CALLS, "  state.refused = false;\n", ""),),
    ),
)
