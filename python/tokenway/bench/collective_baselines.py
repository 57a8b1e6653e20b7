"""What gathers and reduce-scatters are measured against: how frameworks do them over torch.distributed.

A baseline leaves its result in `out`. Buffers are reused; those that are summed in place are 0 while they are timed.
"""

from __future__ import annotations

from typing import Any

from tokenway import tensors
from tokenway.bench.collective_row import Row

NAMES = {"gloo": ("gloo-allreduce", "gloo-padded"), "nccl": ("nccl-allreduce", "nccl-grouped", "nccl-padded")}


def _torch_tensor(x: Any) -> Any:
    return x if tensors.is_torch(x) else tensors.to_torch(x)


class _Baseline:
    collectives: tuple[str, ...] = ("all_gatherv", "reduce_scatterv")

    def __init__(self, row: Row, rank: int, tensor: Any):
        self.row, self.rank = row, rank
        self.rows = _torch_tensor(tensor(row.inputs(rank)))
        self.begin = sum(row.sizes[:rank])
        self.mine = slice(self.begin, self.begin + row.sizes[rank])
        self._out: Any = None

    @classmethod
    def does(cls, row: Row) -> bool:
        """Whether it can do a row."""
        return row.collective in cls.collectives

    @property
    def out(self) -> Any:
        """The result, on the host as NumPy's."""
        if self._out.is_cuda:
            return self._out
        import torch

        bits = self._out.contiguous().view(torch.uint8).numpy()
        return bits.view(tensors.numpy_dtype(self.row.dtype)).reshape(self._out.shape)

    def calm(self) -> None:
        """Before it is timed: sums in place would grow."""
        self.rows.zero_()


class AllReduce(_Baseline):
    """All-reduce of everything, of which the own rows are taken: half of it for nothing."""

    collectives = ("reduce_scatterv",)

    def __init__(self, *args: Any):
        super().__init__(*args)
        self._out = self.rows[self.mine]

    def __call__(self) -> None:
        import torch.distributed as dist

        dist.all_reduce(self.rows)


class Padded(_Baseline):
    """`all_gather_into_tensor` or `reduce_scatter_tensor` of as many rows as the largest rank has; of equal sizes none
    is padded, and so none copied."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        n, most, hidden = self.row.ranks, max(max(self.row.sizes), 1), self.row.hidden
        self.even = len(set(self.row.sizes)) == 1 and self.row.sizes[0] > 0
        self.padded = self.rows.new_zeros((n * most, hidden))
        self.one = self.rows.new_zeros((most, hidden))
        begins = [sum(self.row.sizes[:r]) for r in range(n)]
        self.parts = [
            (self.padded[r * most : r * most + k], b, k)
            for r, (k, b) in enumerate(zip(self.row.sizes, begins, strict=True))
        ]
        if self.row.collective == "reduce_scatterv":
            self._out = self.one[: self.row.sizes[self.rank]]
        else:
            self._out = self.padded if self.even else self.rows.new_zeros((sum(self.row.sizes), hidden))

    def __call__(self) -> None:
        import torch.distributed as dist

        if self.row.collective == "reduce_scatterv":
            for part, begin, count in () if self.even else self.parts:
                part.copy_(self.rows[begin : begin + count])
            dist.reduce_scatter_tensor(self.one, self.rows if self.even else self.padded)
            return
        if not self.even:
            self.one[: len(self.rows)].copy_(self.rows)
        dist.all_gather_into_tensor(self.padded, self.rows if self.even else self.one)
        for part, begin, count in () if self.even else self.parts:
            self._out[begin : begin + count].copy_(part)


class Grouped(_Baseline):
    """A reduce, or a broadcast, for each rank, in one group of NCCL's: how SGLang does both for uneven sizes."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.whole = self.rows
        if self.row.collective == "all_gatherv":
            self.whole = self.rows.new_zeros((sum(self.row.sizes), self.row.hidden))
            self.whole[self.mine].copy_(self.rows)
        begins = [sum(self.row.sizes[:r]) for r in range(self.row.ranks)]
        self.parts = [self.whole[b : b + k] for b, k in zip(begins, self.row.sizes, strict=True)]
        self._out = self.whole[self.mine] if self.row.collective == "reduce_scatterv" else self.whole

    def __call__(self) -> None:
        import torch.distributed as dist

        with dist._coalescing_manager(device=self.whole.device):  # what torch has for ncclGroupStart and End
            for rank, part in enumerate(self.parts):
                if not len(part):
                    continue
                if self.row.collective == "reduce_scatterv":
                    dist.reduce(part, rank)
                else:
                    dist.broadcast(part, rank)

    def calm(self) -> None:
        self.whole.zero_()


GLOO = {"gloo-allreduce": AllReduce, "gloo-padded": Padded}
NCCL = {"nccl-allreduce": AllReduce, "nccl-grouped": Grouped, "nccl-padded": Padded}
