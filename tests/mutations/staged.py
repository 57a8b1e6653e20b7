"""Mutations of staged transport: messages, the moves they take, and whom a wait blames."""

from mutation import Edit, Mutation

STAGED_CC = "src/cpu/staged.cc"
GATHERED = "src/cpu/gathered.h"

NOTE = "      store(offset, signal, flight.mine[me_].note);\n      continue;"
UNPACKED = "      unpack({beginning, frame.bytes - rest, rest > 0 ? whole + inline_bytes_ : nullptr, rest});\n"
STORED = "      store(offset, signal, frame.note);"

STAGED = (
    Mutation(
        "a second move that only some ranks make",
        "S6",
        "staged_test",
        "Staged.EveryWayAgainstTheOracle",
        (Edit(STAGED_CC, "  for (Frame& frame : flight.mine) frame.most = most;\n", ""),),
    ),
    Mutation(
        "rests of messages taken from where the first one is",
        "S4",
        "staged_test",
        "Staged.EveryWayAgainstTheOracle",
        (Edit(STAGED_CC, "flight.rest_recv.data() + flight.arrived[source]", "flight.rest_recv.data()"),),
    ),
    Mutation(
        "a long message without its beginning",
        "S4",
        "staged_test",
        "Staged.EveryWayAgainstTheOracle",
        (Edit(STAGED_CC, "      std::memcpy(whole, beginning, inline_bytes_);\n", ""),),
    ),
    Mutation(
        "the part of a row that its block had no room for is its beginning again",
        "S9",
        "staged_test",
        "Staged.EveryWayAgainstTheOracle",
        (Edit(STAGED_CC, "static_cast<const std::byte*>(from) + first, n - first", "from, n - first"),),
    ),
    Mutation(
        "whoever is waited for is blamed",
        "S6",
        "staged_test",
        "Staged.LateRank",
        (Edit(STAGED_CC, "if (!reached(sent, at.step)) return {how, rank};", "if (sent == 1) return {how, rank};"),),
    ),
    Mutation(
        "a gathered row in the slots of its receiver",
        "S9",
        "staged_test",
        "Staged.EveryWayAgainstTheOracle",
        (Edit(GATHERED, "int64_t{source} * call.bound", "int64_t{call.context.me} * call.bound"),),
    ),
    Mutation(
        "bounds of other ranks taken for one's own",
        "S10",
        "staged_test",
        "Staged.BoundsDiffer",
        (
            Edit(STAGED_CC, "      store(offset, signal, frame.note);\n      continue;", NOTE),
            Edit(STAGED_CC, "signal.mode == own.mode && frame.note == mine.note &&", "signal.mode == own.mode &&"),
            Edit(STAGED_CC, UNPACKED + STORED, UNPACKED + STORED.replace("frame.note", "flight.mine[me_].note")),
        ),
    ),
)
