"""Mutations of sums by domain."""

from mutation import COMBINE, CONFIG, ROW_TYPES, Edit, Mutation

DOMAINS = "src/exchange/domains.h"
ORACLE = "python/tokenway/domain_reference.py"
UNIT = "domain_test"
SUMS = "Domain.FoldsAreSummed"
BY_HAND = "Domain.OrderAndRoundingAreTheDefinition"
FOLDED = "    const int32_t terms = fold_terms(domains, rows, ranks, count, folds, map.shape().combine_bytes, fold);\n"

DOMAIN = (
    Mutation(
        "the owner's domain comes first",
        "bits",
        UNIT,
        BY_HAND,
        (
            Edit(
                COMBINE,
                FOLDED,
                """    const auto is_own = [&](int32_t rank) { return domains.of(rank) == domains.of(t.rank()); };
    const int32_t begin = static_cast<int32_t>(std::find_if(ranks, ranks + count, is_own) - ranks);
    const int32_t end = begin + static_cast<int32_t>(std::count_if(ranks + begin, ranks + count, is_own));
    std::rotate(rows, rows + begin, rows + end);
    std::rotate(ranks, ranks + begin, ranks + end);
"""
                + FOLDED,
            ),
        ),
    ),
    Mutation(
        "domains are summed from the last on",
        "bits",
        UNIT,
        BY_HAND,
        (Edit(COMBINE, FOLDED, FOLDED + "    std::reverse(rows, rows + terms);\n"),),
    ),
    Mutation(
        "terms are summed as they are, neither folded nor rounded",
        "bits",
        UNIT,
        BY_HAND,
        (Edit(DOMAINS, "domains.of(ranks[next]) == domains.of(ranks[first])", "ranks[next] == ranks[first]"),),
    ),
    Mutation(
        "the oracle's folds are not rounded",
        "bits",
        "py/test_domain",
        "test_the_oracle_by_hand",
        (
            Edit(
                ORACLE,
                "ordered_sum(shape, partials)[at].astype(wire).astype(np.float32)",
                "ordered_sum(shape, partials)[at]",
            ),
        ),
    ),
    Mutation(
        "a fold is rounded to the type of the result",
        "bits",
        UNIT,
        SUMS,
        (
            Edit(
                COMBINE,
                "travels{types.from, types.from, ",
                "travels{types.from, types.to == twFloat32 ? types.from : types.to, ",
            ),
        ),
    ),
    Mutation(
        "a domain has a rank too many",
        "bits",
        UNIT,
        SUMS,
        (Edit(DOMAINS, "given > 1 && given < ranks ? given : 0", "given > 1 && given < ranks ? given + 1 : 0"),),
    ),
    Mutation(
        "domains begin a rank early",
        "bits",
        UNIT,
        SUMS,
        (Edit(DOMAINS, "return rank / size;", "return (rank + 1) / size;"),),
    ),
    Mutation(
        "one domain of all ranks is rounded once more",
        "bits",
        UNIT,
        SUMS,
        (Edit(DOMAINS, "given > 1 && given < ranks ?", "given > 1 && given <= ranks ?"),),
    ),
    Mutation(
        "folds of a sum lie over each other",
        "bits",
        UNIT,
        SUMS,
        (Edit(DOMAINS, "    made += bytes;\n", ""),),
    ),
    Mutation(
        "folds start from the bias of the first token",
        "bits",
        UNIT,
        SUMS,
        (
            Edit(
                COMBINE,
                "types.from, types.elements, false};\n  const auto fold",
                "types.from, types.elements, false, 0, types.bias};\n  const auto fold",
            ),
        ),
    ),
    Mutation(
        "ranks may differ in their domains",
        "bits",
        UNIT,
        "Domain.RanksAgreeOnIt",
        (Edit(CONFIG, '  visit("config.domain", given.domain);\n', ""),),
    ),
    Mutation(
        "folds of rows that return as fp8",
        "bits",
        UNIT,
        "Domain.RowsOfFp8AreRefused",
        (Edit(ROW_TYPES, "domain > 0 && type.dtype == twFloat8e4m3", "domain > 0 && type.dtype == twUint8"),),
    ),
)
