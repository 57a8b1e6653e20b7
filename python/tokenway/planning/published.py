"""Figures that others have published, beside which predictions are put. None of them is of Tokenway.

Each is of DeepSeek-V3's shapes (7168 elements, 256 experts, top-8), and fp8 dispatches with bfloat16 combines where it
says so; pplx's page states neither dtypes nor routing, and is compared as if it were the same.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Figure:
    """us of a dispatch and a combine, by whom, on which of MACHINES, and where they stand."""

    library: str
    machine: str
    gpus: int
    tokens: int
    dispatch_us: float
    combine_us: float
    source: str


_PPLX = "pplx-garden, docs/fabric-lib.md"
_LEGACY = "DeepEP, docs/legacy.md (H800)"
_TRT = "TensorRT-LLM, One-Sided AlltoAll Over NVLink (GB200 NVL72)"

FIGURES: tuple[Figure, ...] = (
    *(
        Figure(name, "h100-cx7", gpus, tokens, dispatch, combine, _PPLX)
        for name, gpus, tokens, dispatch, combine in (
            ("pplx", 8, 128, 50.5, 65.3),
            ("pplx", 16, 128, 110.2, 185.5),
            ("pplx", 32, 128, 153.9, 266.3),
            ("pplx", 64, 128, 187.5, 309.1),
            ("DeepEP", 8, 128, 42.6, 72.0),
            ("DeepEP", 16, 128, 123.9, 203.0),
            ("DeepEP", 32, 128, 159.1, 285.0),
            ("DeepEP", 64, 128, 177.9, 325.0),
            ("DeepEP", 16, 4096, 2481.9, 1863.9),
            ("DeepEP", 32, 4096, 3680.2, 3565.4),
            ("DeepEP", 64, 4096, 5071.6, 5922.7),
        )
    ),
    *(
        Figure("DeepEP V1 low latency", "h100-cx7", gpus, 128, dispatch, combine, _LEGACY)
        for gpus, dispatch, combine in (
            (16, 118, 195),
            (32, 155, 273),
            (64, 173, 314),
            (128, 192, 369),
            (256, 194, 360),
        )
    ),
    *(
        Figure("TensorRT-LLM one-sided", "gb200-nvl72", gpus, tokens, dispatch, combine, _TRT)
        for gpus, tokens, dispatch, combine in (
            (8, 128, 31.7, 38.1),
            (8, 2048, 311.8, 322.6),
            (16, 128, 34.6, 39.9),
            (32, 128, 37.8, 41.1),
            (64, 1, 27.8, 32.6),
            (64, 128, 41.6, 44.5),
            (64, 2048, 399.2, 372.1),
        )
    ),
    # NCCL EP's paper draws low latency (bfloat16, 128 tokens, 1 to 8 nodes of H100) without telling numbers.
)
