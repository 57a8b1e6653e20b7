"""DeepEP's functions of 2.5 beside its buffers: numbers, domains, and what buffers have as methods too."""

from __future__ import annotations

from typing import Any

from tokenway.compat.deep_ep.config import ALLOCATION_ALIGNMENT


def get_num_allocation_alignment() -> int:
    """Bytes of which DeepEP wants num_bytes to be a multiple."""
    return ALLOCATION_ALIGNMENT


def get_num_rdma_alignment() -> int:
    """Bytes of which DeepEP wants tensors of some of its calls to be multiples. Tokenway does not ask for it."""
    return 64


def get_num_tma_alignment() -> int:
    """Likewise."""
    return 32


def get_physical_domain_size(group_or_buffer: Any) -> tuple[int, int]:
    """(1, N): all ranks of a process group, or of a buffer, are one domain."""
    group = getattr(group_or_buffer, "group", group_or_buffer)
    return 1, group.size()


def get_logical_domain_size(group_or_buffer: Any, allow_hybrid_mode: bool | None = None) -> tuple[int, int]:
    """As `get_physical_domain_size`."""
    return get_physical_domain_size(group_or_buffer)


def barrier(buffer: Any, *args: Any, **kwargs: Any) -> None:
    """As the buffer's own. Collective."""
    buffer.barrier(*args, **kwargs)


def get_comm_stream(buffer: Any) -> Any:
    """As the buffer's own."""
    return buffer.get_comm_stream()


def destroy_all_managed_nccl_comm() -> None:
    """Nothing: no communicator of NCCL was made."""
