"""Mutations of the values of choices that a combine returns beside its rows."""

from mutation import COMBINE, CPU, MAP, ROW_TYPES, Edit, Mutation

VALUES_API = "src/api/choice_values.cc"
UNIT = "choice_values_test"

CHOICE_VALUES = (
    Mutation(
        "a choice's value of whichever rank returned the token last",
        "bits",
        UNIT,
        "ChoiceValues.EachIsOfTheRankThatServedTheChoice",
        (Edit(COMBINE, "if (id < 0 || placement.rank[id] != from.rank) continue;", "if (id < 0) continue;"),),
    ),
    Mutation(
        "values of a choice that nobody served stay what they were",
        "bits",
        UNIT,
        "ChoiceValues.EachIsOfTheRankThatServedTheChoice",
        (Edit(COMBINE, "    std::fill_n(out + first, top_k, 0.0f);\n", ""),),
    ),
    Mutation(
        "own values are not returned where own rows stay",
        "bits",
        UNIT,
        "ChoiceValues.EachIsOfTheRankThatServedTheChoice",
        (Edit(COMBINE, "if (stays && !values) continue;", "if (stays) continue;"),),
    ),
    Mutation(
        "all values of a token at one place",
        "S10",
        UNIT,
        "ChoiceValues.EachIsOfTheRankThatServedTheChoice",
        (
            Edit(
                MAP,
                "return bank_at(channel, bank) + values_begin() + place * choice_bytes(shape_.top_k);",
                "return bank_at(channel, bank) + values_begin() + (place - position) * choice_bytes(shape_.top_k);",
            ),
        ),
    ),
    Mutation(
        "values among the partials of the inbox",
        "S10",
        UNIT,
        "ChoiceValues.EachIsOfTheRankThatServedTheChoice",
        (
            Edit(
                MAP,
                "return (inbox_rows(shape_) * shape_.combine_bytes + sizeof(float) - 1) / sizeof(float) * "
                "sizeof(float);",
                "return 0;",
            ),
        ),
    ),
    Mutation(
        "values at the places of the first part",
        "bits",
        UNIT,
        "ChoiceValues.OfCombinesInParts",
        (
            Edit(
                COMBINE,
                "t.local(map.inbox_values(at.channel, at.bank(), token - part.begin, position));",
                "t.local(map.inbox_values(at.channel, at.bank(), token, position));",
            ),
        ),
    ),
    Mutation(
        "ranks differ in whether they have values",
        "S10",
        UNIT,
        "ChoiceValues.RanksThatDifferAreTold",
        (Edit(ROW_TYPES, "if (rows->values) rows->digest = mix_rows(kChoiceValuesDigest, rows->digest);\n", "\n"),),
    ),
    Mutation(
        "values of a combine that failed",
        "outputs are safe after an error",
        UNIT,
        "ChoiceValues.RanksThatDifferAreTold",
        (
            Edit(
                CPU,
                "if (call.sent.values) fill_nan(call.values.out, twFloat32,",
                "if (false) fill_nan(nullptr, twFloat32,",
            ),
        ),
    ),
    Mutation(
        "values without room",
        "S10",
        UNIT,
        "ChoiceValues.ThereMustBeRoomForBoth",
        (Edit(ROW_TYPES, "if (!rows.values || bytes <= most) return {};", "if (bytes > 0) return {};"),),
    ),
    Mutation(
        "values that an output overwrites",
        "arguments",
        UNIT,
        "ChoiceValues.RefusedOnesAreToldAtOnce",
        (Edit(VALUES_API, "TW_RETURN_IF_FAILED(check_apart(written, given));\n", ""),),
    ),
)
