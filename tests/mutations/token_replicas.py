"""Mutations of token replicas: shares of tokens, and sums that are passed on."""

from mutation import Edit, Mutation

SET = "src/exchange/token_replicas.h"
SHARING = "src/exchange/sharing.h"
CPU_SHARING = "src/cpu/sharing.h"
ROUTING_API = "src/api/routing.cc"
UNIT = "token_replicas_test"

TOKEN_REPLICAS = (
    Mutation(
        "the last tokens of a set are nobody's",
        "every token is sent once",
        UNIT,
        "TokenReplicas.SharesCoverAllTokens",
        (Edit(SET, "return at * (tokens / size) + (at < more ? at : more);", "return at * (tokens / size);"),),
    ),
    Mutation(
        "a replica does not get the sums of the rank before it",
        "bits",
        UNIT,
        "TokenReplicas.AllGetAllSums",
        (Edit(SHARING, "turn < set.size; ++turn", "turn < set.size - 1; ++turn"),),
    ),
    Mutation(
        "sums of all places at that of the first",
        "S10",
        UNIT,
        "TokenReplicas.AllGetAllSums",
        (Edit(SHARING, "bank + places.row(q, set.place, i), share(q)", "bank + places.row(q, 0, i), share(q)"),),
    ),
    Mutation(
        "sums are read where another set's would begin",
        "bits",
        UNIT,
        "TokenReplicas.AllGetAllSums",
        (Edit(SHARING, "static_cast<uint64_t>(set.begin(tokens, place)) * bytes;", "0;"),),
    ),
    Mutation(
        "ids do not count in the digest",
        "unlike tokens are found",
        UNIT,
        "TokenReplicas.UnlikeTokensAreTold",
        (
            Edit(
                SET,
                "scramble(scramble(scramble(place + 0x9e3779b9u) ^ id) ^ weight)",
                "scramble(scramble(place + 0x9e3779b9u) ^ weight)",
            ),
        ),
    ),
    Mutation(
        "weights do not count in the digest",
        "unlike tokens are found",
        UNIT,
        "TokenReplicas.UnlikeTokensAreTold",
        (Edit(ROUTING_API, "std::bit_cast<uint32_t>(weight));", "0u);"),),
    ),
    Mutation(
        "a rank looks at its own set alone",
        "a step fails on all ranks alike",
        UNIT,
        "TokenReplicas.UnlikeTokensAreTold",
        (
            Edit(
                CPU_SHARING,
                "end.code == twSuccess ? find_unlike(digests, transport.ranks(), set.size) : -1;",
                "end.code == twSuccess && find_unlike(digests + set.first, set.size, set.size) >= 0 ? "
                "set.first + find_unlike(digests + set.first, set.size, set.size) : -1;",
            ),
        ),
    ),
    Mutation(
        "sums of a set that was unlike",
        "outputs are safe after an error",
        UNIT,
        "TokenReplicas.UnlikeTokensAreTold",
        (
            Edit(
                CPU_SHARING,
                "  if (end.code != twSuccess) {\n    spoil_sharing(call, handle);\n    return end;",
                "  if (end.code != twSuccess) {\n    return end;",
            ),
        ),
    ),
)
