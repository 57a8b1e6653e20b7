"""TensorRT-LLM: its expert-parallel communication through Tokenway, as a method that is forced by its name.

    from tokenway.integrations import tensorrt_llm as tokenway_tensorrt_llm

    tokenway_tensorrt_llm.register()  # in every worker process, before the model is made
    os.environ["TRTLLM_FORCE_COMM_METHOD"] = "TOKENWAY"

docs/FRAMEWORKS.md says what works, and what ranks must do alike.
"""

from __future__ import annotations

import importlib
import inspect
import socket
import weakref
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

from tokenway import InvalidArgument, InvalidUsage, Unsupported
from tokenway.integrations import supported

LEAST, BELOW = "1.2", "1.5"
METHOD = "TOKENWAY"
# Where TensorRT-LLM has it, by age, the newest first.
PLACES = ("tensorrt_llm._torch.moe.fused_moe.communication", "tensorrt_llm._torch.modules.fused_moe.communication")
# What this integration is written for: the abstract methods of `Communication`, and what its factory's
# `_create_forced_method` begins with.
ASKED = {
    "is_platform_supported": (),
    "is_workload_feasible": ("self", "all_rank_num_tokens", "num_chunks"),
    "dispatch": (
        "self",
        "hidden_states",
        "hidden_states_sf",
        "token_selected_slots",
        "token_final_scales",
        "all_rank_num_tokens",
        "use_dp_padding",
        "kwargs",
    ),
    "combine": ("self", "final_hidden_states", "kwargs"),
}
FORCED = ("method", "model_config", "num_experts", "num_slots", "top_k")

_made: type | None = None
_met: dict[tuple[int, ...], MpiRanks] = {}
_users: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # how many layers hold a group


def register(*, timeout: float | None = None) -> type:
    """Makes TOKENWAY a method of TensorRT-LLM's `CommunicationFactory` here, for TRTLLM_FORCE_COMM_METHOD and
    for a layer's `communication_method`. Which layers have a communication stays TensorRT-LLM's to say: those of
    attention with data parallelism, without tensor parallelism of experts. Not collective; in every worker process,
    before a model is made in it. Returns the class, the same one the second time.

    timeout: seconds after which a late rank is an error, default 100. Errors: Unsupported, which names what was found,
    where TensorRT-LLM or PyTorch is missing, too old or too new, or where its interface is another one."""
    global _made
    if _made is not None:
        return _made
    supported.check_framework("tensorrt-llm", LEAST, BELOW)
    package = _package()
    base, factory = package.Communication, package.CommunicationFactory
    _check_interface(base, factory)
    made = type("TokenwayCommunication", (RowsBySource, base), {"__doc__": RowsBySource.__doc__})
    original = factory._create_forced_method
    signature = inspect.signature(original)

    @wraps(original)
    def create(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        if given["method"].upper() != METHOD:
            return original(*args, **kwargs)
        config = given["model_config"]
        hidden = given.get("hidden_size")
        return made(
            config.mapping,
            given["num_slots"],
            given["top_k"],
            config.pretrained_config.hidden_size if hidden is None else hidden,
            config.torch_dtype,
            config.max_num_tokens,
            timeout=timeout,
        )

    factory._create_forced_method = staticmethod(create)
    _made = made
    return made


class RowsBySource:
    """Rows by source rank, each token once to each of its ranks; sums over ranks in their order, float32.

    What TensorRT-LLM's `Communication` asks for, which stands behind it in the class that `register` makes. num_slots,
    top_k: of the routings; hidden_size, dtype: of what experts return; max_num_tokens: no rank has more in a call,
    None: unknown. Not collective: the group is made in the first dispatch, as models are made on no device, with room
    for max_num_tokens. All layers alike share it, so that a dispatch and its combine end before another layer's
    begin."""

    mapping: Any
    ep_size: int

    def __init__(
        self,
        mapping: Any,
        num_slots: int,
        top_k: int,
        hidden_size: int,
        dtype: Any,
        max_num_tokens: int | None = None,
        *,
        timeout: float | None = None,
    ):
        super().__init__(mapping)  # type: ignore[call-arg]
        if num_slots % self.ep_size:
            told = f"is {num_slots}; it must be a multiple of the {self.ep_size} ranks that share them"
            raise InvalidArgument.of("num_slots", told, value=num_slots)
        self.num_slots, self.top_k, self.max_num_tokens = num_slots, top_k, max_num_tokens
        self._results, self._timeout = (dtype, hidden_size), timeout
        self._exchange: Any = None  # RankMajor
        self._statistics: Any = None

    @staticmethod
    def is_platform_supported() -> bool:
        """Everywhere: where devices do not reach each other, the first dispatch says so, on all ranks."""
        return True

    def is_workload_feasible(self, all_rank_num_tokens: Sequence[int], num_chunks: int) -> bool:
        """Unless a rank has more tokens than the model was made for. Any number of chunks: they come one by one."""
        return self.max_num_tokens is None or max(all_rank_num_tokens) <= self.max_num_tokens

    def dispatch(
        self,
        hidden_states: Any,
        hidden_states_sf: Any,
        token_selected_slots: Any,
        token_final_scales: Any,
        all_rank_num_tokens: Sequence[int],
        use_dp_padding: bool | None = None,
        **kwargs: Any,
    ) -> tuple[Any, Any, Any, Any]:
        """As TensorRT-LLM documents it: rows [N * b, ...] by source rank, b being the largest of all_rank_num_tokens,
        or 1. Slots are global, and -1 where there is no token, or a token has none. Rows and scales are views of the
        window until the combine, which copies nothing of rows that experts wrote in the same place.

        hidden_states, hidden_states_sf: [T, C] and [T, S] of any dtypes; T is at most b. eplb_local_stats: [E] of any
        dtype, where the rows are, on all ranks or none, in a step more: `get_eplb_gathered_statistics`. Other keywords
        are for other methods. A step of all ranks; collective too, on the host, the first time and where b is larger
        than ever before and than max_num_tokens. Errors: as `RankMajor.dispatch`; InvalidArgument for an
        active_rank_mask; those of `all_gatherv`, after which there is no combine to be made."""
        exchange = self._made(hidden_states)  # before all that this rank may be refused alone, so that peers hear of it
        with exchange.telling():
            bound = self._bound(all_rank_num_tokens)
        exchange.make_room(bound)
        statistics = kwargs.get("eplb_local_stats")
        with exchange.telling(bound):
            if kwargs.get("active_rank_mask") is not None:
                raise InvalidArgument.of("active_rank_mask", "is given; it must be None, as no rank is left out here")
            if statistics is not None:
                _check_statistics(statistics, hidden_states)
        given = hidden_states, token_selected_slots, token_final_scales, hidden_states_sf, bound
        self._statistics = None
        came = exchange.dispatch(*given)
        if statistics is not None:
            self._statistics = self._gathered(statistics)
        return (
            came.tokens.flatten(0, 1),
            None if hidden_states_sf is None else came.payloads["scales"].flatten(0, 1),
            came.ids.flatten(0, 1),
            None if token_final_scales is None else came.weights.flatten(0, 1).to(token_final_scales.dtype),
        )

    def combine(self, final_hidden_states: Any, **kwargs: Any) -> Any:
        """As TensorRT-LLM documents it: [N * b, H] or [N, b, H], weighted and summed over this rank's experts, become
        [T, H]. A step of all ranks. Errors: as `RankMajor.combine`."""
        if self._exchange is None:
            raise InvalidUsage("a combine comes without a dispatch before it")
        return self._exchange.combine(final_hidden_states)

    def get_eplb_gathered_statistics(self) -> Any:
        """[N, E]: what each rank gave to the last dispatch as eplb_local_stats; None if none did."""
        return self._statistics

    def destroy(self) -> None:
        """Collective: the last of the layers that share a group closes it. A further dispatch makes it anew."""
        exchange, self._exchange, self._statistics = self._exchange, None, None
        if exchange is None:
            return
        _users[exchange.shared] -= 1
        if not _users[exchange.shared]:
            exchange.shared.close()

    def _bound(self, sizes: Sequence[int]) -> int:
        if len(sizes) != self.ep_size or min(sizes) < 0:
            told = f"is {list(sizes)}; it must be {self.ep_size} integers from 0 on, one for each rank"
            raise InvalidArgument.of("all_rank_num_tokens", told)
        return max(1, *sizes)

    def _made(self, rows: Any) -> Any:
        """The exchange, where rows are. Collective the first time, if it needs a group, or a larger one."""
        if self._exchange is not None:
            return self._exchange
        from tokenway.integrations import groups
        from tokenway.integrations.rank_major import RankMajor

        peers = groups.of(_ranks(self.mapping), device=rows.device, timeout=self._timeout)
        shared = peers.shared(experts=self.num_slots, top_k=self.top_k, id_space="global", invalid_id=-1)
        shared.open.refuse()  # a combine of another layer, or peers would wait in that one, and this rank here
        dtype, hidden = self._results
        self._exchange = RankMajor(shared, self.max_num_tokens or 1, dtype, hidden, hidden * dtype.itemsize)
        _users[shared] = _users.get(shared, 0) + 1
        return self._exchange

    def _gathered(self, statistics: Any) -> Any:
        """Those of all ranks, behind the dispatch, whose combine does not come where this fails."""
        from tokenway.integrations import collectives
        from tokenway.pytorch import gradients

        with gradients.telling(self._exchange.refuse_combine):
            every = collectives.of(_ranks(self.mapping), statistics.device)
            return every.all_gatherv([statistics[None]], [1] * self.ep_size)[0]


def _check_statistics(statistics: Any, rows: Any) -> None:
    """Raises InvalidArgument for what cannot be gathered beside rows."""
    from torch import Tensor

    if not isinstance(statistics, Tensor) or statistics.dim() != 1 or statistics.device != rows.device:
        found = f"is of type {type(statistics).__name__}"
        if isinstance(statistics, Tensor):
            found = f"has shape {list(statistics.shape)} on {statistics.device}"
        told = f"{found}; it must be a tensor of one dimension on {rows.device}, where the rows are"
        raise InvalidArgument.of("eplb_local_stats", told)


class MpiRanks:
    """Ranks of MPI, as `tokenway.connect` takes what is like a process group: with a store, which rank 0 of them holds.

    world: a communicator of mpi4py; ranks: of it, in their order here. Collective among these ranks alone."""

    def __init__(self, world: Any, ranks: Sequence[int]):
        from torch.distributed import TCPStore

        comm = world.Create_group(world.Get_group().Incl(list(ranks)))
        self.rank, self.size = comm.Get_rank(), comm.Get_size()
        hosts = comm.allgather(socket.gethostname())
        host = "localhost" if len(set(hosts)) == 1 else hosts[0]
        if self.rank == 0:
            self.store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        port = comm.bcast(self.store.port if self.rank == 0 else None, 0)
        if self.rank > 0:
            self.store = TCPStore(host, port, is_master=False, wait_for_workers=False)


def _ranks(mapping: Any) -> Any:
    """The ranks that share the experts, as `groups.of` takes them: those of a mapping's process group where
    TensorRT-LLM goes without MPI, or of MPI, which meet the first time."""
    from tensorrt_llm._utils import mpi_comm, mpi_disabled

    if mpi_disabled():
        return mapping.moe_ep_group_pg
    ranks = tuple(mapping.moe_ep_group)
    if ranks not in _met:
        _met[ranks] = MpiRanks(mpi_comm(), ranks)
    return _met[ranks]


def _package() -> Any:
    """TensorRT-LLM's package of communications. Raises Unsupported where there is none."""
    for place in PLACES:
        try:
            return importlib.import_module(place)
        except ModuleNotFoundError as error:
            if not error.name or not f"{place}.".startswith(f"{error.name}."):  # of something that it needs itself
                raise
    raise Unsupported(f"tensorrt-llm has neither {PLACES[0]} nor {PLACES[1]}; this integration is for one of them")


def _check_interface(base: type, factory: type) -> None:
    """Raises Unsupported, which names the difference, unless TensorRT-LLM's interface is what this is written for."""
    asked = set(getattr(base, "__abstractmethods__", ()))
    if asked != set(ASKED):
        told = f"asks for {', '.join(sorted(asked))}; this integration has {', '.join(sorted(ASKED))}"
        raise Unsupported(f"TensorRT-LLM's Communication {told}")
    for name, wanted in ASKED.items():
        _check_names(f"Communication.{name}", getattr(base, name), wanted, None)
    _check_names("CommunicationFactory._create_forced_method", factory._create_forced_method, FORCED, len(FORCED))


def _check_names(name: str, function: Callable[..., Any], wanted: tuple[str, ...], most: int | None) -> None:
    found = tuple(inspect.signature(function).parameters)[:most]
    if found != wanted:
        told = f"takes ({', '.join(found)}); this integration is for ({', '.join(wanted)})"
        raise Unsupported(f"TensorRT-LLM's {name} {told}")
