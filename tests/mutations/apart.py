"""Mutations of how ranks meet by an allgather: which are on one host, and what is heard of one that cannot come."""

from mutation import Edit, Mutation

ALLGATHER = "src/bootstrap/allgather.cc"

APART = (
    Mutation(
        "network namespaces of one host are one",
        "S6",
        "comm_test",
        "Comm.RanksThatAreApartMayBeTold",
        (Edit(ALLGATHER, "sizeof a.host) == 0 && std::memcmp(", "sizeof a.host) == 0 || std::memcmp("),),
    ),
    Mutation(
        "a rank that cannot take part says nothing",
        "S6",
        "comm_test",
        "Comm.ARankThatCannotTakePartSaysWhy",
        (Edit(ALLGATHER, "  if (!ready.ok()) named = ready;\n", ""),),
    ),
)
