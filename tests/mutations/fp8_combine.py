"""Mutations of rows that a combine returns as fp8."""

from mutation import ROW_TYPES, Edit, Mutation

FP8_ROWS = "src/cpu/fp8_rows.cc"
WIRE = "src/quantize/wire.h"
UNIT = "fp8_combine_test"
BLOCKS = "Fp8Combine.BlocksHaveScalesOfTheirOwn"
SATURATES = "Fp8Combine.OneScaleSaturates"
DIFFER = "Fp8Combine.RanksThatDifferAreTold"
REFUSED = "Fp8Combine.RefusedScalesAreToldAtOnce"

FP8_COMBINE = (
    Mutation(
        "values of fp8 without their scale",
        "bits",
        UNIT,
        BLOCKS,
        (Edit(FP8_ROWS, "to[i] = kFp8Floats[values[i]] * scale;", "to[i] = kFp8Floats[values[i]];"),),
    ),
    Mutation(
        "all blocks of fp8 by the scale of the first",
        "bits",
        UNIT,
        BLOCKS,
        (
            Edit(
                FP8_ROWS,
                "std::memcpy(&scale, values + scales + sizeof(float) * (begin / kOfScale), sizeof scale);",
                "std::memcpy(&scale, values + scales, sizeof scale);",
            ),
        ),
    ),
    Mutation(
        "what is beyond fp8 becomes NaN",
        "bits",
        UNIT,
        SATURATES,
        (Edit(WIRE, "e4m3(saturated(divide(value, scale)));", "e4m3(divide(value, scale));"),),
    ),
    Mutation(
        "an infinity saturates as fp8",
        "bits",
        UNIT,
        SATURATES,
        (Edit(WIRE, "return spoils(value) ? kNanValue : e4m3(", "return e4m3("),),
    ),
    Mutation(
        "ranks differ in the scale of fp8",
        "S10",
        UNIT,
        DIFFER,
        (Edit(ROW_TYPES, "if (rows->scales != twScalesNone) {", "if (false) {"),),
    ),
    Mutation(
        "rows of fp8 whose scales have no room",
        "S10",
        UNIT,
        REFUSED,
        (Edit(ROW_TYPES, "  if (*bytes <= most) return {};\n", "  if (*bytes > 0) return {};\n"),),
    ),
    Mutation(
        "rows of fp8 without a scale",
        "arguments",
        UNIT,
        REFUSED,
        (Edit(ROW_TYPES, "if (!given && input.wire_scales != twScalesBlocks) {", "if (false) {"),),
    ),
)
