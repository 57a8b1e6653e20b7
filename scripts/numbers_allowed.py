"""Numbers that may stand in kernels and in src/cuda/host, with the reason; check_tree.py refuses others.

A number that was tuned stands in src/cuda/plan/tuning.cc. What stands here follows from a format or from the hardware,
or bounds how long something that goes wrong is looked at.
"""

from __future__ import annotations

# What code is made of: counting, a warp's threads, bytes of a word and of a vector.
PLAIN = frozenset({0, 1, 2, 3, 4, 7, 8, 16, 31, 32})

# File below src/cuda -> number -> why.
ALLOWED: dict[str, dict[int, str]] = {
    "collective/collective.cuh": {128: "4 words for each of a warp's 32 threads"},
    "collective/reduce.cu": {0x7FC00000: "NaN of float32", 0x7FC0: "NaN of bfloat16", 0x7E00: "NaN of float16"},
    "collective/sharing.cu": {
        0x7FC00000: "NaN of float32",
        0x7FC0: "NaN of bfloat16",
        0x7E00: "NaN of float16",
        0x3F800000: "the float 1",
    },
    "combine/chunks.cuh": {
        10: "a block a tenth slower than the mean leaves the last chunks to the others",
        512: "bytes that a warp's 32 threads load at 16 each",
    },
    "combine/combine.cu": {33: "ranks that a warp's threads can each have one of, beside this rank"},
    "combine/fp8.cuh": {
        0x7FFFFF: "the fraction of a float32",
        5: "a word of eight",
        6: "a word of eight",
        0xFFFF: "the lower of two elements of 16 bits",
        0x7FFF7FFF: "the magnitudes of two elements of 16 bits",
        0x7FC00000: "NaN of float32",
    },
    "combine/sums.cuh": {
        100: "ns between looks at a signal",
        0x7FC00000: "NaN of float32",
        0x7FC0: "NaN of bfloat16",
        0x7E00: "NaN of float16",
    },
    "combine/values.cu": {0x7FC00000: "NaN of float32"},
    "combine/tiles.cuh": {256: "vectors from which on a tile's loads are worth a loop of their own"},
    "counts/counts.cu": {40: "bits of a number of rows, below those of the rank that would receive them"},
    "device/block.cuh": {64: "bytes of a line of parameters, which are read once to be in the cache"},
    "device/ll128.cuh": {0xFF: "the eight threads of a packet", 100: "ns between looks at a packet"},
    "device/loads.cuh": {50: "ns between looks"},
    "device/ptx.cuh": {20: "ns between looks at a gate in shared memory"},
    "device/routing.cuh": {
        5: "index of an id",
        6: "index of an id",
        100: "ns between looks at a peer block's progress",
        200: "ns between looks at marks",
    },
    "device/sum.cuh": {0xFFFF0000: "the upper of two bfloat16 in a word"},
    "device/wait.cuh": {
        1000000: "ns of a ms",
        20000: "looks, 10 ms: a block that waits for tile after tile looks around once in 0.2 ms",
        29: "bits of a note, as exchange/notes.h has them before a group says otherwise",
        50: "naps of a microsecond before a kernel that is being stopped looks again",
        64: "looks between two looks at what is far",
        200: "ns before the lock of the reports is tried again",
        256: "looks between two looks at the clock",
        500: "ns of a nap when a wait is long",
        1000: "ns of a nap",
    },
    "dispatch/ll128.cu": {28: "bits of a signal's count (exchange/signals.h)"},
    "dispatch/ll128_places.cuh": {28: "bits of a signal's count (exchange/signals.h)"},
    "dispatch/ll128_send.cuh": {0x3F800000: "1.0f"},
    "dispatch/ll128_tiles.cuh": {256: "the bit from which on a thread's words are the second payload's"},
    "dispatch/send_loop.cuh": {128: "bytes of a packet", 512: "bytes that a warp's 32 threads load at 16 each"},
    "host/backend.cc": {20: "ms in which a kernel says what it waits for, beside another's trouble"},
    "host/control.cc": {
        20: "ms between looks at the peers' processes",
        100: "ms for signals that are on their way from a process that has ended",
        4095: "page size less one",
        4096: "page size",
    },
    "host/control_apart.cc": {
        50: "ms between notices of how far this rank is",
        60: "ms for the last notices, behind the timeout",
        100: "ms for what a peer says to arrive",
        300: "ms for a death or an abort to be told, where a network has failed",
        1000: "ms at most between two questions that must be answered alike",
    },
    "host/counts.cc": {
        20: "us between looks, once counts are late",
        1000: "looks, some 10 us, before the host takes counts for late",
    },
    "host/creation.cc": {
        9: "compute capability from which on packets are tried",
        1000000: "ns of a ms",
        10_000_000_000: "ns, 10 s: a self-test of links is over by then, whatever the timeout",
    },
    "host/group_memory.h": {18: "256 KB: several pages at a time, where experts are not a hundred thousand"},
    "host/group_memory.cc": {63: "alignment less one", 64: "bytes of alignment"},
    "host/tables.h": {63: "alignment less one", 64: "bytes of alignment"},
    "host/settle.cc": {5: "us, the shortest nap of a wait for the device", 1000: "us, the longest"},
    "host/steps.cc": {5: "ms between looks", 500: "ms to find out who is to blame for moves that cannot be made"},
    "counts/balance.cu": {256: "threads of a block that chooses by a map that moves"},
    "step/step.cu": {
        63: "the bit of a test's flags, which no step has",
        256: "threads of a kernel that publishes and drains signals alone",
        1024: "threads of a block, the most that there can be",
        0x9E3779B97F4A7C15: "2^64 by the golden ratio: every round's bytes differ",
        0xFF51AFD7ED558CCD: "MurmurHash3's mixer: every place's bytes differ",
    },
    "step/fold.cu": {512: "threads of a block that copies or sums"},
    "step/pull.cu": {
        40: "bits of a word of a trial below its rank",
        256: "threads of a block that tries what a rank sees",
        512: "threads of a block that copies",
    },
    "step/post.cu": {256: "threads of a kernel that waits alone", 512: "threads of a block that copies"},
    "transport/posted_folds.cc": {20: "a power of two: a MiB"},
    "transport/posted.cc": {
        10: "a power of two: a KiB",
        16: "most blocks that copy for a rank of this host; not tuned",
        64: "KiB for a rank of this host that are worth a block that copies; not tuned",
        512: "KiB of a rank's rows that are worth a message for its host; an estimate (decision 0071)",
        4096: "bytes of a piece that ranks try to see",
        5_000_000_000: "ns that they wait for it",
        50: "us between looks whether it is over",
    },
    "transport/posted.h": {24: "tags of meetings"},
    "transport/gin.cc": {10: "s for what NCCL takes down alone", 200: "us between looks at a step of NCCL's"},
    "transport/window.cc": {30: "a power of two: a GiB"},
    "view/staged.cu": {512: "threads of a block that copies", 4096: "bytes that a warp copies at a time; not tuned"},
    "view/counting.cuh": {64: "rows whose experts a block finds at a time", 4096: "experts that are counted at a time"},
    "view/index_lists.cu": {
        64: "most blocks of a kernel of which each reads all ids",
        16384: "choices that a block counts in about the time that a further kernel takes",
    },
    "launch/view.h": {128: "blocks that have counts each", 4096: "experts that are counted at a time"},
    "view/by_expert.cuh": {4096: "experts in shared memory"},
    "view/view.cuh": {512: "threads of a block that copies"},
}
