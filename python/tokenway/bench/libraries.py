"""Other libraries of this kind, as baselines: each through its public Python API, in a process of its own (turns.py).

Each is sized for the tokens of its row, so it pays nothing for larger ones. A pair is what it does for a new routing,
as a Tokenway pair is: FlashInfer and DeepEP take ids in their dispatch, NCCL EP updates its handle before. Ids and
weights travel where the library carries them. Experts' rows lie where its combine reads them without a copy, if it has
such a place. Rows and sums are checked; a library may put rows in any order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import numpy as np

from tokenway import tensors
from tokenway.bench.baselines import Plan, check_sum
from tokenway.bench.case import FP8, Case
from tokenway.bench.verify import Mismatch

Array = np.ndarray


class Library(ABC):
    """A library on one rank, for one case. Making one, closing it and its calls are collective.

    rows: the experts' rows as `combine` reads them, [..., H]; `arrived` says which of them are used.
    """

    name = ""
    module = ""  # imported in its process, before the first case
    dtypes: ClassVar[tuple[str, ...]] = ("bfloat16", FP8)
    weighs = False  # its combine multiplies by the weights

    def __init__(self, plan: Plan, device: Any, flat: bool = False):
        """flat: rows one after the other, in any order, where the library has a mode for that."""
        import torch

        self.flat = flat
        self.plan, self.case, self.rank, self.device = plan, plan.case, plan.rank, device
        values, scales = self.case.inputs(self.rank)
        self.values = self.on(values)
        self.scales = None if scales is None else self.on(scales)
        self.ids = self.on(self.case.exchange.ids[self.rank])
        self.weights = self.on(self.case.exchange.weight[self.rank])
        self.answer = getattr(torch, self.case.combine_dtype)
        self.received: Any = None  # of the last dispatch: tokens and, of fp8, scales; [..., H] and [..., S]
        self.out: Any = None  # of the last combine: [T, H]
        self.make()
        self.dispatch()
        self.rows = self.room()

    @classmethod
    def refuses(cls, case: Case) -> str | None:
        """What it cannot do of a case, the same on all ranks, or None."""
        if case.dtype not in cls.dtypes:
            return f"dtype: {case.dtype}; it takes {' and '.join(cls.dtypes)}"
        if case.profile.experts % case.ranks:
            return f"{case.profile.experts} experts on {case.ranks} ranks; it wants as many on each"
        return None

    @classmethod
    def installed(cls) -> type[Library]:
        """What serves the version that is there."""
        return cls

    @property
    def local_experts(self) -> int:
        """As many as each rank has."""
        return self.case.profile.experts // self.case.ranks

    def on(self, array: Array) -> Any:
        """On the rank's device."""
        return tensors.to_torch(np.ascontiguousarray(array)).to(self.device)

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """Zeros on the rank's device."""
        import torch

        return torch.zeros(shape, dtype=dtype, device=self.device)

    def make(self) -> None:  # noqa: B027  most have something, none must
        """What lives as long as the case does."""

    @abstractmethod
    def dispatch(self) -> None:
        """Of the routing, as if it were new."""

    @abstractmethod
    def combine(self) -> None:
        """Of `rows`."""

    def __call__(self) -> None:
        self.dispatch()
        self.combine()

    def room(self) -> Any:
        """Where `combine` reads rows: called once, behind a dispatch."""
        return self.empty(tuple(self.received[0].shape), self.answer)

    @abstractmethod
    def arrived(self) -> Array:
        """Which rows of the last dispatch are filled: bool, of the shape of `received` without H."""

    def by_source(self) -> Array:
        """`arrived` where rank s has its first rows in [s]."""
        slots = np.arange(self.received[0].shape[1])
        return slots[None] < np.asarray(self.plan.recv_counts)[:, None]

    def close(self) -> None:  # noqa: B027  likewise
        """Gives back what `make` took."""


class FlashInfer(Library):
    """`MoeAlltoAll`: one-sided kernels over NVLink, rows by source."""

    name = "flashinfer"
    module = "flashinfer.comm.trtllm_moe_alltoall"
    RANKS, TOP_K = 64, 22

    @classmethod
    def refuses(cls, case: Case) -> str | None:
        """Beside what all refuse, its own bounds."""
        for what, value, most in (("ranks", case.ranks, cls.RANKS), ("top-k", case.profile.top_k, cls.TOP_K)):
            if value > most:
                return f"{what}: {value}; it has room for {most}"
        return super().refuses(case)

    def make(self) -> None:
        """A workspace that all ranks map."""
        from flashinfer.comm.comm_backend import TorchDistBackend
        from flashinfer.comm.mapping import Mapping
        from flashinfer.comm.mnnvl import MnnvlConfig
        from flashinfer.comm.trtllm_moe_alltoall import MoeAlltoAll

        n, profile = self.case.ranks, self.case.profile
        place = Mapping(n, self.rank, gpus_per_node=n, tp_size=n, moe_ep_size=n, moe_tp_size=1)
        self._all = MoeAlltoAll(
            place,
            max_num_tokens=self.case.tokens,
            top_k=profile.top_k,
            num_experts=profile.experts,
            hidden_size=profile.hidden,
            mnnvl_config=MnnvlConfig(comm_backend=TorchDistBackend()),
        )
        given = [self.values, self.scales, self.ids, self.weights]
        self._payloads = [payload for payload in given if payload is not None]
        self._waits = False

    def dispatch(self) -> None:
        """Tokens, scales, ids and weights as payloads of one call. It wants a combine between two."""
        if self._waits:
            self.combine()
        self._waits = True
        self.received = self._all.dispatch(self.ids, self._payloads, self.case.tokens)[: 1 + bool(self.case.scales)]

    def combine(self) -> None:
        """Of rows in the workspace."""
        self.out = self._all.combine(self.rows, self.case.tokens, payload_in_workspace=True)
        self._waits = False

    def room(self) -> Any:
        """The workspace's own."""
        return self._all.get_combine_payload_tensor_in_workspace(
            self.case.tokens, self.case.profile.hidden, self.answer
        )

    def arrived(self) -> Array:
        """By source."""
        return self.by_source()


class DeepEP(Library):
    """`deep_ep` as installed: `EPBuffer` of 2.5, or `Buffer` with its low-latency calls of 1 and 2.1."""

    name = "deepep"
    module = "deep_ep"

    @classmethod
    def installed(cls) -> type[Library]:
        """One of the two."""
        import deep_ep

        return ElasticDeepEP if hasattr(deep_ep, "EPBuffer") else LegacyDeepEP


class ElasticDeepEP(Library):
    """`EPBuffer`: rows of a rank in a row, as many as come, in memory for all that may. No wait for the host."""

    name = "deepep"

    def make(self) -> None:
        """A buffer for bfloat16 or fp8 rows."""
        import deep_ep
        import torch.distributed as dist

        profile = self.case.profile
        self._buffer = deep_ep.EPBuffer(
            dist.group.WORLD,
            num_max_tokens_per_rank=self.case.tokens,
            hidden=profile.hidden,
            num_topk=profile.top_k,
            use_fp8_dispatch=bool(self.case.scales),
            explicitly_destroy=True,
        )
        self._sms = self._buffer.get_theoretical_num_sms(profile.experts, profile.top_k)
        self._sent = self.values if self.scales is None else (self.values, self.scales)
        self._ids = self.ids.to(deep_ep.topk_idx_t)

    def dispatch(self) -> None:
        """By ids, with weights."""
        got, _, _, self._handle, _ = self._buffer.dispatch(
            self._sent,
            topk_idx=self._ids,
            topk_weights=self.weights,
            num_experts=self.case.profile.experts,
            num_sms=self._sms,
            do_cpu_sync=False,
        )
        self.received = got if isinstance(got, tuple) else (got,)

    def combine(self) -> None:
        """By the last dispatch's handle."""
        self.out, _, _ = self._buffer.combine(self.rows, handle=self._handle, num_sms=self._sms)

    def arrived(self) -> Array:
        """The first."""
        return np.arange(len(self.received[0])) < sum(self.plan.recv_counts)

    def close(self) -> None:
        """Collective."""
        self._buffer.destroy()


class LegacyDeepEP(Library):
    """`low_latency_dispatch` and `low_latency_combine`: rows by expert, weighed where they are summed. Of fp8 they
    quantise rows themselves."""

    name = "deepep"
    dtypes = ("bfloat16",)
    weighs = True

    def make(self) -> None:
        """A buffer with a queue pair for each local expert, as its low-latency calls want."""
        import deep_ep
        import torch.distributed as dist

        case, experts = self.case, self.case.profile.experts
        room = deep_ep.Buffer.get_low_latency_rdma_size_hint(case.tokens, case.profile.hidden, case.ranks, experts)
        self._buffer = deep_ep.Buffer(
            dist.group.WORLD, 0, room, low_latency_mode=True, num_qps_per_rank=self.local_experts
        )
        self._ids = self.ids.long()

    def dispatch(self) -> None:
        """By ids; weights stay."""
        got, self._counts, self._handle, _, _ = self._buffer.low_latency_dispatch(
            self.values, self._ids, self.case.tokens, self.case.profile.experts, use_fp8=False
        )
        self.received = (got,)

    def combine(self) -> None:
        """By the last dispatch's handle."""
        self.out, _, _ = self._buffer.low_latency_combine(self.rows, self._ids, self.weights, self._handle)

    def arrived(self) -> Array:
        """The first of each expert."""
        slots = np.arange(self.received[0].shape[1])
        return slots[None] < self._counts.cpu().numpy()[:, None]


class NcclEp(Library):
    """`nccl.ep`: low latency, rows by source; of flat and grouped runs high throughput, one row after the other."""

    name = "nccl-ep"
    module = "nccl.ep"
    _comm: ClassVar[Any] = None  # of the process

    def make(self) -> None:
        """A group, a handle, and descriptors of all that the calls take."""
        import torch
        from nccl import ep
        from nccl.ep.interop.torch import get_nccl_comm_from_group

        if NcclEp._comm is None:
            NcclEp._comm = get_nccl_comm_from_group()
        case, flat = self.case, self.flat
        n, t, k, hidden = case.ranks, case.tokens, case.profile.top_k, case.profile.hidden
        self._group = ep.Group.create(
            NcclEp._comm,
            ep.GroupConfig(
                algorithm=ep.Algorithm.HIGH_THROUGHPUT if flat else ep.Algorithm.LOW_LATENCY,
                num_experts=case.profile.experts,
                max_dispatch_tokens_per_rank=t,
                max_recv_tokens_per_rank=n * t if flat else 0,  # so that a graph can hold it
                max_token_bytes=-(-max(case.dispatch_row, case.combine_row) // 16) * 16,
                num_topk=k,
            ),
        )
        ids = self.ids.long()
        lead = (n * t,) if flat else (n, t)
        self.received = (self.empty((*lead, hidden), self.values.dtype),)
        if self.scales is not None:
            self.received += (self.empty((*lead, case.scales), torch.float32),)
        self.out = self.empty((t, hidden), self.answer)
        kinds = {"topk_weights": torch.float32, "topk_idx": torch.int64}
        beside = {name: ep.Tensor(self.empty((*lead, k), kind)) for name, kind in kinds.items()}
        scales = [None, None] if self.scales is None else [ep.Tensor(x) for x in (self.scales, self.received[1])]
        self._ep, self._topk = ep, ep.Tensor(ids)
        self._sent = ep.DispatchInputs(ep.Tensor(self.values), ep.Tensor(self.weights), scales[0])
        self._got = ep.DispatchOutputs(tokens=ep.Tensor(self.received[0]), scales=scales[1], **beside)
        recipe = ep.DispatchQuantizationRecipe
        self._how = ep.DispatchConfig(quantization_recipe=recipe.NONE if self.scales is None else recipe.FWD)
        layout = ep.Layout.FLAT if flat else ep.Layout.RANK_MAJOR
        self._handle = self._group.create_handle(layout, self._topk, stream=self._stream())
        self._answers = self.empty(tuple(self.received[0].shape), self.answer)
        self._back = ep.CombineInputs(tokens=ep.Tensor(self._answers)), ep.CombineOutputs(tokens=ep.Tensor(self.out))

    def _stream(self) -> int:
        import torch

        return 0 if self.device == "cpu" else torch.cuda.current_stream().cuda_stream

    def dispatch(self) -> None:
        """The handle learns the ids, then the rows go."""
        stream = self._stream()
        self._handle.update(self._topk, stream=stream)
        self._handle.dispatch(self._sent, self._got, config=self._how, stream=stream)

    def combine(self) -> None:
        """By the same handle."""
        self._handle.combine(*self._back, stream=self._stream())

    def room(self) -> Any:
        """What its descriptor says."""
        return self._answers

    def arrived(self) -> Array:
        """By source, or the first."""
        if not self.flat:
            return self.by_source()
        return np.arange(len(self.received[0])) < sum(self.plan.recv_counts)

    def close(self) -> None:
        """Collective."""
        self._handle.destroy()
        self._group.destroy()


LIBRARIES: dict[str, type[Library]] = {library.name: library for library in (FlashInfer, DeepEP, NcclEp)}

# ---- is it an exchange at all --------------------------------------------------------------------------------------


def check(library: Library) -> None:
    """One exchange whose experts answer what came. Raises Mismatch unless the rows are those that were sent, each as
    often as it should, and the sums the oracle's within rounding. Collective."""
    plan, where = library.plan, f"{library.case.name}: {library.name} on rank {library.rank}"
    library.dispatch()
    filled = library.arrived()
    rows = _bytes_of(library, filled)
    sent = np.concatenate(plan.received)
    known = {row[:KEY].tobytes(): index for index, row in enumerate(sent)}
    which = np.array([known.get(row[:KEY].tobytes(), -1) for row in rows], int)
    experts = np.nonzero(filled)[0] + library.rank * library.local_experts if library.weighs else np.zeros_like(which)
    once = len({*zip(which.tolist(), experts.tolist(), strict=True)}) == len(which) == _expected(library)
    if not once or (which < 0).any() or not np.array_equal(rows, sent[which]):
        raise Mismatch(f"{where} received other rows than were sent to it")
    from tokenway.bench.gpu_case import to_numpy

    answers = _raw(library, rows, experts) if library.weighs else np.concatenate(plan.parts)[which]
    library.rows[library.on(filled)] = library.on(answers)
    library.combine()
    check_sum(plan, library.name, to_numpy(library.out))


KEY = 32  # bytes of a row that tell it from others: elements are drawn at random


def _expected(library: Library) -> int:
    """How many rows come: one for each token, or for each of its experts that are here."""
    if not library.weighs:
        return sum(library.plan.recv_counts)
    return sum(int((routing.owner == library.rank).sum()) for routing in library.case.exchange.routing)


def _raw(library: Library, rows: Array, experts: Array) -> Array:
    """What each row's expert answers, without a weight."""
    case = library.case
    values = rows.view(tensors.numpy_dtype(case.dtype))
    out = np.empty((len(rows), case.profile.hidden), tensors.numpy_dtype(case.combine_dtype))
    case.answers(values, None, experts[:, None], np.ones((len(rows), 1), np.float32), out)
    return out


def _bytes_of(library: Library, filled: Array) -> Array:
    """The filled rows, scales behind the tokens: uint8 [n, row]."""
    import torch

    mask = library.on(filled)
    parts = [part.view(torch.uint8)[mask].cpu().numpy() for part in library.received]
    return np.ascontiguousarray(np.concatenate(parts, axis=1))
