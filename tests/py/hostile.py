"""A child that calls the C library with rubbish. Prints what it did; crashing is the failure.

    python tests/py/hostile.py SEED CASES

Every call ends in a known result, every failure in a sentence, nothing is written beyond a struct's
size; in between, the group that was tormented does whole rounds that are verified bit for bit. What a
library cannot know is not tried: pointers to memory that is not there, strides into it.
"""

from __future__ import annotations

import collections
import ctypes
import faulthandler
import random
import sys
from typing import Any

import cases
import harness
import numpy as np
import player

import tokenway as tw
from tokenway import _header
from tokenway._native import lib
from tokenway.settings import Settings, make_config

INT64 = (0, 1, -1, 2, 7, -(2**63), 2**63 - 1, 2**62, -(2**62), 2**60 + 1, 2**32, -3)
STRIDES = (0, 1, -1, 7, 500, -500, 2**63 - 1, -(2**63), 2**62, -(2**62), 2**60 + 1)
INT32 = (0, 1, -1, 2, 3, 7, 8, 9, 15, 16, 64, 65, 1000, 2**31 - 1, -(2**31), 2**28, 2**20)
BAD_POINTERS = (0, 1, 8, 64, 0xDEADBEEF, 2**64 - 64)
ROOM = 1 << 17  # bytes behind every struct
CANARY = 0xCD
MOST_ROOM_FOR = 64  # configurations that `twGroupConfig_t.room_for` names; more are refused unread

SETUP = cases.Setup(ranks=1, experts=6, hidden=4, lanes=3, payloads=((3, "uint8"),))
CONFIG = cases.Setup(ranks=1).settings()
PLACEMENT = _header.Placement()
PLACEMENT.num_layers, PLACEMENT.load_decay = 1, 0.5
TOKENS = 5


class Memory:
    """Memory that tensors may point to, with room on both sides."""

    def __init__(self, rng: random.Random):
        self.bytes = np.frombuffer(rng.randbytes(1 << 21), np.uint8).copy()
        self.middle = (self.bytes.ctypes.data + (1 << 20)) // 64 * 64
        self.numbers = np.zeros(1 << 20, np.int32)

    def pointer(self, rng: random.Random) -> int:
        return rng.choice((0, self.middle, self.middle + 1, self.middle + 64, self.middle + 2))


def leaves(kind: Any, base: int = 0, path: str = "") -> list[tuple[str, int, Any]]:
    """(path, offset, ctype) of every number in a struct."""
    found = []
    for name, of in kind._fields_:
        offset = base + getattr(kind, name).offset
        count, item = 1, of
        if isinstance(of, type) and issubclass(of, ctypes.Array):
            count, item = of._length_, of._type_
        for i in range(count):
            at = offset + i * ctypes.sizeof(item)
            if isinstance(item, type) and issubclass(item, ctypes.Structure):
                found += leaves(item, at, f"{path}{name}.")
            elif item is not ctypes.c_char:
                found.append((path + name, at, item))
    return found


LEAVES = {
    kind: leaves(kind)
    for kind in vars(_header).values()
    if isinstance(kind, type) and issubclass(kind, ctypes.Structure) and hasattr(kind, "_fields_")
}


@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
def one_rank(mine: int, everybody: int, size: int, context: int | None) -> int:
    """An allgather that is right for one rank only."""
    ctypes.memmove(everybody, mine, size)
    return 0


class Torment:
    """One seed's worth of calls."""

    def __init__(self, seed: int):
        self.rng = random.Random(seed)
        self.memory = Memory(self.rng)
        self.comm = tw.local_comms(1)[0]
        self.env = harness.Env(self.comm, harness.Cpu)
        self.group = tw.Group(self.comm, **SETUP.settings())
        table = tw.Placement([0, 1, 2, 0], count_loads=True)
        self.mapped = tw.Group(self.comm, **CONFIG | {"experts": 3, "top_k": 2, "expert_map": table})
        self.seen = (ctypes.c_int64 * 64)()
        self.handles: list[int] = []
        self.stale: list[int] = [1, 8]
        self.results: collections.Counter[str] = collections.Counter()
        self.keep: list[Any] = []
        self.buffers: collections.deque[Any] = collections.deque(maxlen=32)  # those of the last calls

    # ---- what every call must do -----------------------------------------------------------------

    def call(self, name: str, *args: Any) -> int:
        """A result that is known, and a sentence if it is a failure."""
        function = getattr(lib, name)
        converted = [
            ctypes.cast(a, t) if isinstance(a, int) and hasattr(t, "contents") else a
            for a, t in zip(args, function.argtypes, strict=True)
        ]
        result = function(*converted)
        label = lib.twResultString(result).decode()
        self.results[f"{name}: {label}"] += 1
        assert label != "unknown result", (name, result)
        assert label != "twInternalError", (name, lib.twLastError())
        if result:
            sentence = lib.twLastError().decode("ascii")
            assert 8 < len(sentence) < 8192 and sentence.isprintable(), (name, sentence)
        return result

    # ---- structs ---------------------------------------------------------------------------------

    def rubbish(self, path: str, kind: Any) -> int:
        """Something for a field; pointers stay in memory that is there."""
        rng, last = self.rng, path.split(".")[-1]
        if kind in (ctypes.c_void_p, ctypes.c_char_p):
            if last == "data":
                return self.memory.pointer(rng)
            if last == "placement":
                return rng.choice((0, self.placement(), self.placement()))
            if last in ("expert_rank", "expert_slot", "slot_expert", "slot_shares"):
                return rng.choice((0, self.memory.numbers.ctypes.data))
            if last == "address":
                text = ctypes.create_string_buffer(rng.choice((b"", b"x" * 300, b"/nowhere/at/all", b"ok")))
                self.keep.append(text)
                return rng.choice((0, ctypes.addressof(text)))
            if last == "room_for":
                return rng.choice((0, self.others()))
            if last == "devices":
                return rng.choice((0, self.memory.numbers.ctypes.data))
            if last == "allgather":
                return rng.choice((0, ctypes.cast(one_rank, ctypes.c_void_p).value or 0))
            return 0 if last.endswith("_context") else rng.choice((0, 1, 0xDEAD))
        if last == "stride":
            return rng.choice(STRIDES)
        if last == "timeout_ms":
            return rng.choice((1, 2, 5, -1, -(2**31)))
        size = ctypes.sizeof(kind)
        if size == 8:
            return rng.choice((*INT64, rng.getrandbits(63)))
        return rng.choice((*INT32, rng.getrandbits(31)))

    def struct(self, kind: Any, valid: Any, spoil: int) -> tuple[Any, int]:
        """(buffer, address) of a copy of `valid` with `spoil` fields made rubbish, perhaps its size too."""
        rng, whole = self.rng, ctypes.sizeof(kind)
        buffer = (ctypes.c_ubyte * ROOM)()
        self.buffers.append(buffer)
        ctypes.memmove(buffer, ctypes.addressof(valid), whole)
        callbacks = ("alloc", "release")
        fields = [f for f in LEAVES[kind] if f[0] != "size"]
        for path, offset, of in rng.choices(fields, k=spoil):
            value = self.rubbish(path, of)
            if path in callbacks and rng.random() < 0.5:
                value = 0
            elif path in callbacks and rng.random() < 0.9:  # one without the other is refused
                other = next(f for f in fields if f[0] in callbacks and f[0] != path)
                ctypes.memset(ctypes.addressof(buffer) + other[1], 0, 8)
            elif path in callbacks:
                value = 0
            raw = (value % 2**64).to_bytes(8, "little")[: ctypes.sizeof(of)]
            ctypes.memmove(ctypes.addressof(buffer) + offset, raw, len(raw))
        self._one_callback(buffer, fields)
        if issubclass(kind, _header.Struct) and spoil and rng.random() < 0.3:
            self._spoil_size(buffer, whole)
        return buffer, ctypes.addressof(buffer)

    def _one_callback(self, buffer: Any, fields: Any) -> None:
        """Both at once would be called."""
        where = {path: offset for path, offset, _ in fields if path in ("alloc", "release")}
        if len(where) == 2 and all(any(buffer[o : o + 8]) for o in where.values()):
            ctypes.memset(ctypes.addressof(buffer) + where["release"], 0, 8)

    def _spoil_size(self, buffer: Any, whole: int) -> None:
        rng = self.rng
        older = rng.randrange(8, whole, 8)  # half a pointer is one to memory that is not there
        size = rng.choice((0, 1, 7, 8, older, older, whole - 1, whole + 1, whole + 8, whole + 500))
        size = rng.choice((size, size, size, 65536, 65537, 2**31, 2**63, 2**64 - 1, rng.getrandbits(64)))
        ctypes.memmove(buffer, size.to_bytes(8, "little"), 8)
        if whole < size <= 65536 and rng.random() < 0.5:
            buffer[rng.randrange(whole, size)] = 1
        elif size < whole:
            ctypes.memset(ctypes.addressof(buffer) + max(size, 8), CANARY, whole - max(size, 8))

    def unharmed(self, buffer: Any, kind: Any) -> None:
        """Nothing lies beyond the size that was said."""
        size = int.from_bytes(bytes(buffer[:8]), "little")
        whole = ctypes.sizeof(kind)
        if size < whole:
            behind = bytes(buffer[max(size, 8) : whole])
            assert set(behind) <= {CANARY}, f"{kind.__name__} of {size} bytes was overrun"
        if size <= ROOM:
            assert not any(bytes(buffer[max(size, whole) :])), f"{kind.__name__} was overrun"

    def tensor(self, dtype: int, shape: tuple[int, ...]) -> _header.Tensor:
        tensor = _header.Tensor(data=self.memory.middle, dtype=dtype, ndim=len(shape))
        stride = 1
        for i in reversed(range(len(shape))):
            tensor.shape[i], tensor.stride[i] = shape[i], stride
            stride *= shape[i]
        return tensor

    # ---- calls -----------------------------------------------------------------------------------

    def any_group(self) -> int:
        if self.rng.random() < 0.96:
            return self.group.pointer
        return self.rng.choice((*BAD_POINTERS, *self.handles[:1], *self.stale))

    def any_handle(self) -> int:
        if self.handles and self.rng.random() < 0.98:
            return self.rng.choice(self.handles[-3:])
        return self.rng.choice((*BAD_POINTERS, self.group.pointer, *self.stale[-4:]))

    def spoil(self) -> int:
        return self.rng.choice((0, 0, 0, 0, 1, 1, 2, 30))

    def dispatch(self) -> None:
        given = _header.DispatchInput()
        given.payloads[0], given.payloads[1] = self.tensor(10, (TOKENS, 4)), self.tensor(1, (TOKENS, 3))
        given.lane = self.rng.choice((-1, -1, 0, 1, 2))
        given.send_only = self.rng.randrange(2)
        out = _header.DispatchOutput()
        out.layout = self.rng.randrange(2)
        if out.layout == 1 and self.rng.random() < 0.5:
            out.column_major[1] = self.rng.choice((1, 1, 1, 2, -1))
            out.origins, out.source_counts = self.tensor(7, (6, 8)), self.tensor(5, (6, 1))
        into, at_in = self.struct(_header.DispatchInput, given, self.spoil())
        onto, at_out = self.struct(_header.DispatchOutput, out, self.spoil())
        where = (at_in if self.rng.random() < 0.97 else 0, at_out if self.rng.random() < 0.97 else 0)
        self.call("twDispatch", self.any_group(), self.any_handle(), *where)
        self.unharmed(into, _header.DispatchInput)
        self.unharmed(onto, _header.DispatchOutput)

    def combine(self) -> None:
        given, out = _header.CombineInput(), _header.CombineOutput()
        given.layout = self.rng.randrange(2)
        lead = (1, 8) if given.layout == 0 else (6, 8)
        given.rows = self.tensor(11, (*lead, 4))
        given.weighting = self.rng.randrange(2)
        given.send_only = self.rng.randrange(2)
        out.tokens = self.tensor(11, (TOKENS, 4))
        _, at_in = self.struct(_header.CombineInput, given, self.spoil())
        _, at_out = self.struct(_header.CombineOutput, out, self.spoil())
        self.call("twCombine", self.any_group(), self.any_handle(), at_in, at_out)

    def routing(self) -> tuple[int, int, list[Any]]:
        ids = np.full((TOKENS, SETUP.top_k), -1, np.int32)
        ids[:, 0] = self.rng.randrange(6)
        if self.rng.random() < 0.2:
            ids[self.rng.randrange(TOKENS)] = self.rng.choice((5, 6, -2, 2**31 - 1, -(2**31)))
        described = self.tensor(5, ids.shape)
        spoil = self.spoil()
        if spoil == 0:
            described.data = ids.ctypes.data
        a, at_ids = self.struct(_header.Tensor, described, spoil)
        b, at_weights = self.struct(_header.Tensor, self.tensor(11, ids.shape), self.spoil())
        chance = self.rng.random()
        return (0 if chance < 0.02 else at_ids), (0 if chance > 0.7 else at_weights), [ids, a, b]

    def create_handle(self) -> None:
        at_ids, at_weights, _keep = self.routing()
        made = ctypes.c_void_p()
        place = ctypes.addressof(made) if self.rng.random() < 0.97 else 0
        memory = self.rng.choice((0,) * 8 + (1, 63))
        if not self.call("twHandleCreate", place, self.any_group(), at_ids, at_weights, memory):
            self.handles.append(made.value or 0)

    def update(self) -> None:
        at_ids, at_weights, _keep = self.routing()
        self.call("twHandleUpdate", self.any_handle(), at_ids, at_weights)

    def complete(self) -> None:
        stream = self.rng.choice((0, 0, 0, 0, 1))
        self.call("twComplete", self.any_group(), self.any_handle(), stream)

    def release(self) -> None:
        self.call("twHandleRelease", self.any_handle())

    def destroy_handle(self) -> None:
        handle = self.any_handle()
        if not self.call("twHandleDestroy", handle):
            self.handles.remove(handle)
            self.stale.append(handle)
            assert self.call("twHandleDestroy", handle)  # twice

    def received(self) -> None:
        counts, total = (ctypes.c_int32 * 1)(), ctypes.c_int32()
        places = [self.rng.choice((0, ctypes.addressof(x))) for x in (counts, total)]
        self.call("twHandleNumRecvTokens", self.any_handle(), *places)

    def ask(self) -> None:
        """Functions that fill a struct."""
        name, kind = self.rng.choice((("twGroupInfo", _header.GroupInfo), ("twGroupGetError", _header.ErrorRecord)))
        buffer, at = self.struct(kind, kind(), self.spoil())
        self.call(name, self.any_group(), self.rng.choice((at, at, at, 0)))
        self.unharmed(buffer, kind)

    def placement(self) -> int:
        buffer, at = self.struct(_header.Placement, PLACEMENT, self.spoil())
        seen = _header.Placement.from_buffer(buffer)
        most = len(self.memory.numbers)  # and as many experts as there can be, each in one slot of its own
        if seen.num_layers * (seen.num_slots or most) > most:
            seen.slot_expert = seen.slot_shares = None
        return at

    def others(self) -> int:
        """As many pointers to configurations as the library reads at most."""
        array = (ctypes.c_void_p * MOST_ROOM_FOR)()
        config, keep = make_config(Settings(**CONFIG))
        one = self.struct(_header.GroupConfig, config, self.rng.choice((0, 0, 1, 2)))
        self.keep += [array, keep, one[0]]
        rubbish = self.rng.random() < 0.5
        for i in range(MOST_ROOM_FOR):
            array[i] = 0 if rubbish and self.rng.random() < 0.5 else one[1]
        return ctypes.addressof(array)

    def config(self) -> tuple[Any, int]:
        config, keep = make_config(Settings(**CONFIG))
        config.timeout_ms = 1000
        self.keep = [keep]
        return self.struct(_header.GroupConfig, config, self.spoil())

    def sizes(self) -> None:
        _, at = self.config()
        buffer, out = self.struct(_header.WindowBytes, _header.WindowBytes(), self.spoil())
        nranks = self.rng.choice((1, 2, 8, 1024, 1025, 0, -1, 2**31 - 1))
        self.call("twGroupWindowBytes", at, nranks, self.rng.choice((out, out, out, 0)))
        self.unharmed(buffer, _header.WindowBytes)

    def create_group(self) -> None:
        _, at = self.config()
        made = ctypes.c_void_p()
        comm = self.rng.choice((self.comm.pointer,) * 8 + (0, 1, self.group.pointer))
        if not self.call("twGroupCreate", ctypes.addressof(made), comm, self.rng.choice((at, at, at, 0))):
            if self.rng.random() < 0.3:
                self.shrink(made.value or 0)
            assert self.call("twCommDestroy", self.comm.pointer)  # not while it has groups
            assert not self.call("twGroupDestroy", made.value)
            assert self.call("twGroupDestroy", made.value)
            self.stale.append(made.value or 0)

    def maps(self) -> None:
        """Calls about the maps of a group that has some, or of another group."""
        numbers, layer = self.memory.numbers.ctypes.data, self.rng.choice(INT32)
        group = self.rng.choice((self.mapped.pointer,) * 3 + (self.any_group(),))
        places = [self.rng.choice((0, numbers, numbers)) for _ in range(2)]
        self.call("twGroupReplaceMap", group, layer, *places, 0)
        self.call("twGroupMap", group, layer, *(self.rng.choice((0, ctypes.addressof(self.seen))) for _ in range(2)))
        self.call("twGroupLoads", group, *(self.rng.choice((0, ctypes.addressof(self.seen))) for _ in range(2)))

    def shrink(self, group: int) -> None:
        _, at = self.config()
        made = ctypes.c_void_p()
        at = self.rng.choice((at, 0))
        if not self.call("twGroupShrink", group, at, ctypes.addressof(made)):
            assert not self.call("twGroupDestroy", made.value)

    def comms(self) -> None:
        config = _header.CommConfig()
        config.timeout_ms = 1
        _, at = self.struct(_header.CommConfig, config, self.spoil())
        made = (ctypes.c_void_p * 1025)()
        nranks = self.rng.choice((0, -1, 1, 2, 3, 1024, 1025, 2**31 - 1))
        count = nranks
        if self.rng.random() < 0.5:
            failed = self.call("twCommCreateLocal", ctypes.addressof(made), nranks, at)
        else:
            rank, count = self.rng.choice((0, 0, 0, 1, -1, 2**31 - 1)), 1
            create = self.rng.choice(("twCommCreateShm", "twCommCreateShm", "twCommCreateCuda"))
            failed = self.call(create, ctypes.addressof(made), rank, nranks, at)
        for pointer in [] if failed else list(made[:count]):
            assert not self.call("twCommDestroy", pointer)
        if not failed:
            assert self.call("twCommDestroy", made[0])

    def odds(self) -> None:
        lib.twResultString(self.rng.choice(INT32))
        texts = [ctypes.c_char_p() for _ in range(3)]
        places = [self.rng.choice((0, *[ctypes.addressof(t)] * 9)) for t in texts]
        self.call("twEnvironment", self.rng.choice(INT32), *places)
        self.call("twLibfabric", *places[:2])
        self.call("twNccl", places[0])
        rank = ctypes.c_int32()
        comm = self.rng.choice((*BAD_POINTERS, self.comm.pointer))
        self.call("twCommRank", comm, self.rng.choice((0, ctypes.addressof(rank))), 0)
        self.call("twCommDevice", comm, self.rng.choice((0, ctypes.addressof(rank))))
        size = ctypes.c_size_t()
        self.call("twHandleMemBytes", self.any_group(), self.rng.choice((0, ctypes.addressof(size))))

    # ---- all of it -------------------------------------------------------------------------------

    def still_works(self, seed: int) -> None:
        """Frees what is held and runs a round, which must be right."""
        for handle in self.handles:
            lib.twComplete(self.group.pointer, handle, None)
            assert not self.call("twHandleDestroy", handle), lib.twLastError()
        self.stale += self.handles
        self.handles = []
        layouts = ("rank_major", "expert_major")
        round_ = cases.Round((8,), seed=seed, layout=layouts[seed % 2], own=seed % 3 == 0)
        case = cases.one(SETUP, round_)
        got = player.Player(self.env, self.group, case).flights()
        cases.verify(SETUP, round_, got[0])
        self.group._blocks.free()

    def run(self, count: int) -> None:
        often = [self.dispatch, self.combine] * 6 + [self.create_handle, self.complete] * 3
        calls = [
            *often,
            *(self.update, self.release, self.destroy_handle, self.received, self.ask, self.sizes),
            *(self.create_group, self.maps, self.comms, self.odds),
        ]
        for n in range(count):
            self.rng.choice(calls)()
            if n % 100 == 99:
                self.still_works(n)
        self.still_works(count)
        self.group.close()
        self.mapped.close()
        self.comm.close()


def main() -> None:
    faulthandler.enable()
    seed, count = int(sys.argv[1]), int(sys.argv[2])
    torment = Torment(seed)
    torment.run(count)
    for name, number in sorted(torment.results.items()):
        print(number, name)


if __name__ == "__main__":
    main()
