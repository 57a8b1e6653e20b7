"""Mutations of combines per expert."""

from mutation import MAP, Edit, Mutation

CHOICES = "src/exchange/choices.h"
PER_EXPERT_API = "src/api/per_expert.cc"
UNIT = "per_expert_test"
SUMS = "PerExpert.TheOwnerSumsOverChoices"

PER_EXPERT = (
    Mutation(
        "choices are summed from the last on",
        "bits",
        UNIT,
        SUMS,
        (
            Edit(
                CHOICES,
                "for (int32_t k = 0; k < top_k; ++k) {\n      if (!",
                "for (int32_t k = top_k - 1; k >= 0; --k) {\n      if (!",
            ),
        ),
    ),
    Mutation(
        "a choice that nobody served is a term",
        "bits",
        UNIT,
        SUMS,
        (Edit(CHOICES, "  if (id < 0) return false;\n", "  if (id < 0) return true;\n"),),
    ),
    Mutation(
        "rows of all choices of a token at one place",
        "S10",
        UNIT,
        SUMS,
        (
            Edit(
                MAP,
                "return bank_at(channel, bank) + (static_cast<uint64_t>(token) * shape_.top_k + k) * "
                "shape_.combine_bytes;",
                "return bank_at(channel, bank) + (static_cast<uint64_t>(token) * shape_.top_k + 0 * k) * "
                "shape_.combine_bytes;",
            ),
        ),
    ),
    Mutation(
        "a row goes to the place of the first choice that its rank serves",
        "bits",
        UNIT,
        SUMS,
        (Edit(CHOICES, "const int32_t k = terms.k[j];", "const int32_t k = terms.k[0];"),),
    ),
    Mutation(
        "weights of the owner's first token for all",
        "bits",
        UNIT,
        SUMS,
        (Edit(CHOICES, "given.of(token)[k]", "given.of(0)[k]"),),
    ),
    Mutation(
        "weights of a combine stay for the next",
        "bits",
        UNIT,
        "PerExpert.ADispatchIsCombinedAgain",
        (
            Edit(
                PER_EXPERT_API,
                "const bool weighted = is_given(input.weights);",
                "static bool kept = false;\n  kept |= is_given(input.weights);\n"
                "  const bool weighted = kept && group.shape().per_expert != 0;",
            ),
        ),
    ),
    Mutation(
        "rows of choices at the places of the first part",
        "bits",
        UNIT,
        "PerExpert.OfCombinesInParts",
        (Edit(CHOICES, "token - part.begin, k));", "token, k));"),),
    ),
    Mutation(
        "an inbox for a row of each rank where rows return per expert",
        "S10",
        UNIT,
        "PerExpert.TheWindowHasRoomForEveryChoice",
        (
            Edit(
                MAP,
                "static_cast<uint64_t>(shape.part_tokens()) * static_cast<uint64_t>(shape.returning());",
                "static_cast<uint64_t>(shape.part_tokens()) * static_cast<uint64_t>(shape.fan_out());",
            ),
        ),
    ),
    Mutation(
        "weights that the output overwrites",
        "arguments",
        UNIT,
        "PerExpert.RefusedCallsAreToldAtOnce",
        (Edit(PER_EXPERT_API, "  return check_apart(written, read);\n", "  return {};\n"),),
    ),
    Mutation(
        "rows by source in a combine per expert",
        "arguments",
        UNIT,
        "PerExpert.RowsBySourceAreRefused",
        (Edit(PER_EXPERT_API, "if (!layout_of(input.layout).by_expert) {", "if (false) {"),),
    ),
    Mutation(
        "weights of the call are dropped where partials return",
        "arguments",
        UNIT,
        "PerExpert.PartialsTakeNoWeights",
        (
            Edit(
                PER_EXPERT_API,
                "    if (!weighted) return {};\n    return fail(",
                "    if (weighted || !weighted) return {};\n    return fail(",
            ),
        ),
    ),
)
