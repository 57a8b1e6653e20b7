"""Mutations of what a rank makes of peers that give the group up."""

from mutation import TRANSPORT, Edit, Mutation

GIVING_UP = (
    Mutation(
        "a rank that is through ends the step of others",
        "S6",
        "eager_peer_test",
        "EagerPeer.ARankThatIsThroughMayGiveUp",
        (
            Edit(
                TRANSPORT,
                "    if (writer == me_ || !reached(load(signal_of(writer, peer, offset)).step, step)) return",
                "    return",
            ),
        ),
    ),
    Mutation(
        "nobody who has sent the step has given up",
        "S6",
        "sticky_test",
        "Sticky.WaitEndsWhenPeersGiveUp",
        (Edit(TRANSPORT, "    when = std::chrono::steady_clock::now() + grace_;\n", ""),),
    ),
)
