"""Mutations of sums that start from a bias."""

from mutation import COMBINE, VECTOR, Edit, Mutation

BIAS_API = "src/api/bias.cc"
UNIT = "bias_test"
FIRST = "Bias.IsTheFirstTerm"

BIAS = (
    Mutation(
        "a sum with partials forgets its bias",
        "bits",
        UNIT,
        FIRST,
        (Edit(VECTOR, "std::min(kGroup, count - j), j == 0 && !biased};", "std::min(kGroup, count - j), j == 0};"),),
    ),
    Mutation(
        "all sums start from the first token's bias",
        "bits",
        UNIT,
        FIRST,
        (
            Edit(
                COMBINE,
                "if (bias.data != nullptr) types.bias.data += token * bias.stride;",
                "if (bias.data != nullptr) types.bias.data += 0 * token;",
            ),
        ),
    ),
    Mutation(
        "a bias that overlaps the output is taken for the output",
        "bits",
        UNIT,
        "Bias.RefusedOnesAreToldAtOnce",
        (Edit(BIAS_API, "return bias.data == tokens.data && ", "return bias.data != nullptr && "),),
    ),
)
