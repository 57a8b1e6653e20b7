"""Tensors to descriptors and back, for NumPy (with ml_dtypes) and PyTorch on the CPU. `cuda.py` has the same for CUDA.

Descriptors are not checked here: one says what a tensor is, and the C library says whether that is right, so that
peers learn of a refusal at once. What is no tensor becomes a descriptor without a dtype. What a descriptor cannot
tell (read-only memory, another device) is found out here, and told beside C's refusal.
"""

from __future__ import annotations

import ctypes
import math
import struct
import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import ml_dtypes
import numpy as np

from tokenway import _header
from tokenway.errors import InvalidArgument

# The C library's dtypes, by the name that NumPy, ml_dtypes and PyTorch share (up to float8's suffix).
CODES = {
    "uint8": 1,
    "int8": 2,
    "int16": 3,
    "uint16": 4,
    "int32": 5,
    "uint32": 6,
    "int64": 7,
    "uint64": 8,
    "float16": 9,
    "bfloat16": 10,
    "float32": 11,
    "float64": 12,
    "float8_e4m3fn": 13,
    "float8_e5m2": 14,
    "bool": 15,
}
NAMES = {code: name for name, code in CODES.items()}

DTYPE_OFFSET = _header.Tensor.dtype.offset
TENSOR_BYTES = ctypes.sizeof(_header.Tensor)
_META = struct.Struct(f"@ii{2 * _header.MAX_DIMS}q")
_POINTER = struct.Struct("@Q")
_WHOLE = struct.Struct(f"@Q{TENSOR_BYTES - DTYPE_OFFSET}s")
NOTHING = (0, bytes(TENSOR_BYTES - DTYPE_OFFSET))

assert _META.size == TENSOR_BYTES - DTYPE_OFFSET and _POINTER.size == DTYPE_OFFSET

# (dtype, shape, strides) to the bytes of a descriptor after its pointer. Shapes repeat, call after call.
_numpy_metas: dict[Any, bytes] = {}
torch_metas: dict[Any, bytes] = {}
_CACHE_LIMIT = 4096


def dtype_name(dtype: Any) -> str:
    """The common name of a NumPy, ml_dtypes or PyTorch dtype, or of a string."""
    if isinstance(dtype, str):
        name = dtype
    elif type(dtype).__module__ == "torch":
        name = str(dtype).removeprefix("torch.")
    else:
        try:
            name = np.dtype(dtype).name
        except TypeError:
            name = ""
    if name not in CODES:
        raise InvalidArgument.of("dtype", f"is {dtype!r}; it must be one of {', '.join(CODES)}")
    return name


def numpy_dtype(name: str) -> np.dtype:
    """The NumPy dtype of a common name."""
    return np.dtype(getattr(ml_dtypes, name) if hasattr(ml_dtypes, name) else name)


def tensor_type() -> type | None:
    """PyTorch's class of tensors, without importing PyTorch: None where nobody has, or another thread is about to."""
    global _tensor_type
    if _tensor_type is None:
        _tensor_type = getattr(sys.modules.get("torch"), "Tensor", None)
    return _tensor_type


def is_torch(x: Any) -> bool:
    """Whether x is a PyTorch tensor, without importing PyTorch. Never raises: no code of x runs."""
    kind = tensor_type()
    return kind is not None and issubclass(type(x), kind)


def _pack(name: str | None, shape: tuple[int, ...], strides: tuple[int, ...]) -> bytes:
    ndim = len(shape)
    if ndim > _header.MAX_DIMS:  # the dimensions are cut; their number is refused
        shape, strides = shape[: _header.MAX_DIMS], strides[: _header.MAX_DIMS]
    pad = (0,) * (_header.MAX_DIMS - len(shape))
    return _META.pack(CODES.get(name or "", 0), ndim, *shape, *pad, *strides, *pad)


def _numpy_meta(x: np.ndarray) -> bytes:
    # A stride that is no multiple of the element (a field of a record) cannot be told: it is refused as no dtype.
    whole = all(s % x.itemsize == 0 for s in x.strides)
    name = x.dtype.name if whole and x.dtype.isnative else None
    return _pack(name, x.shape, tuple(s // x.itemsize for s in x.strides))


def _slow_address(x: np.ndarray) -> int:
    return x.__array_interface__["data"][0]


def _fast_address(x: np.ndarray) -> int:
    return ctypes.c_size_t.from_address(id(x) + object.__basicsize__).value


def _choose_address() -> Callable[[np.ndarray], int]:
    """How to find an array's data. NumPy's ABI has it right behind the object's head; reading it there takes 0.3 us,
    the public way 0.9, and an exchange asks up to seven times. Where it is not there, the public way serves."""
    if sys.implementation.name != "cpython":
        return _slow_address
    probes = [np.empty(n, np.uint8) for n in (1, 64, 4096)]
    probes += [probe[1:] for probe in probes]
    return _fast_address if all(_fast_address(x) == _slow_address(x) for x in probes) else _slow_address


_address = _choose_address()

Describe = Callable[[Any], tuple[int, bytes]]
_tensor_type: type | None = None  # PyTorch's, once one was described


def describe(x: Any) -> tuple[int, bytes]:
    """(address, the descriptor's bytes after it) of a tensor; NOTHING for what is none. Raises what the tensor's own
    code does when it is asked: `described` does not."""
    kind = type(x)
    if kind is np.ndarray:
        key = (x.dtype, x.shape, x.strides)
        meta = _numpy_metas.get(key)
        if meta is None:
            if len(_numpy_metas) >= _CACHE_LIMIT:
                _numpy_metas.clear()
            meta = _numpy_metas[key] = _numpy_meta(x)
        return _address(x), meta
    if kind is _tensor_type or is_torch(x):
        return describe_torch(x) if x.is_cpu else NOTHING
    if isinstance(x, np.ndarray) and not isinstance(x, np.ma.MaskedArray):
        return describe(np.asarray(x))
    return NOTHING


def describe_torch(x: Any) -> tuple[int, bytes]:
    """The same of a PyTorch tensor, wherever it is. Raises for layouts without strides, as PyTorch does: asking each
    for its layout takes longer."""
    strides = x.stride()
    # What lies in memory is not what the tensor says: the imaginary part of a conjugate. Its elements never follow
    # each other, so no other tensor is asked.
    if strides and strides[-1] != 1 and x.is_neg():
        return NOTHING
    key = (x.dtype, x.shape, strides)
    return x.data_ptr(), torch_metas.get(key) or _torch_meta(key)


def described(describe: Describe, x: Any) -> tuple[int, bytes]:
    """The same of what may raise anything when it is asked: NOTHING, so that the C library refuses it, and tells the
    peers, who wait for this rank. `obstacle` has what was raised, for the caller."""
    try:
        return describe(x)
    except Exception:
        return NOTHING


def obstacle(describe: Describe, x: Any) -> Exception | None:
    """What a tensor's own code raises when it is described."""
    try:
        describe(x)
    except Exception as error:
        return error
    return None


# PyTorch's tensors that stand for others, and what to give instead.
_STAND_INS = {
    "DTensor": "a DTensor; give its to_local()",
    "FakeTensor": "a FakeTensor, which has a shape and no memory; make the call outside of what is traced, or through "
    "tokenway.ops",
    "FunctionalTensor": "a FunctionalTensor, of a graph that is traced; make the call outside of it, or through "
    "tokenway.ops",
}


def unlike_torch(x: Any) -> str | None:
    """What a PyTorch tensor is that no descriptor can tell of, wherever it is, whatever its dtype and shape."""
    what = without_memory(x)
    if what is None and x.is_neg():
        what = "a negated view (torch.Tensor.is_neg); it must be resolved (resolve_neg)"
    if what is None:
        describe_torch(x)  # which may raise
    return what


def without_memory(x: Any) -> str | None:
    """What a PyTorch tensor is whose elements nobody could read, by copying it either."""
    for kind in type(x).__mro__:
        if kind.__name__ in _STAND_INS and kind.__module__.startswith("torch."):
            return _STAND_INS[kind.__name__]
    if x.layout is not sys.modules["torch"].strided:
        return f"a tensor of layout {x.layout}; it must be strided"
    if x.data_ptr() == 0 and x.numel() and not x.is_meta:  # which is elsewhere
        return f"a {type(x).__name__} without memory of its own; give the tensor that it stands for"
    return None


def unlike_array(x: np.ndarray) -> str | None:
    """The same of an array."""
    if isinstance(x, np.ma.MaskedArray):
        return "a masked array, whose mask nobody would look at; give its filled()"
    return None


def legible(unlike: Callable[[Any], str | None], x: Any) -> str | None:
    """What `unlike` says of x, whatever x does when it is asked."""
    try:
        return unlike(x)
    except Exception as error:
        return f"of type {type(x).__name__}, and cannot be read: {type(error).__name__}: {error}"


def _torch_meta(key: tuple[Any, ...]) -> bytes:
    if len(torch_metas) >= _CACHE_LIMIT:
        torch_metas.clear()
    meta = torch_metas[key] = _pack(str(key[0]).removeprefix("torch."), *key[1:])
    return meta


class Slot:
    """The place of one tensor descriptor in a C struct that is used for call after call."""

    __slots__ = ("_bytes", "_describe", "offset")

    def __init__(self, owner: ctypes.Structure, tensor: _header.Tensor, describe: Describe = describe):
        self._describe = describe
        self._bytes = memoryview(owner).cast("B")
        self.offset = ctypes.addressof(tensor) - ctypes.addressof(owner)

    def set(self, x: Any) -> None:
        """Describes x, or nothing where that raises."""
        try:  # as `described`, on the way of every token
            pointer, meta = self._describe(x)
        except Exception:
            pointer, meta = NOTHING
        _WHOLE.pack_into(self._bytes, self.offset, pointer, meta)

    def clear(self) -> None:
        """No data: asks an output for a view."""
        _POINTER.pack_into(self._bytes, self.offset, 0)

    def pointer(self) -> int:
        """The address that the C library has filled in."""
        return _POINTER.unpack_from(self._bytes, self.offset)[0]


class Routing:
    """The descriptors of a routing's tensors, used for call after call. place: Host or cuda.Cuda."""

    __slots__ = ("_ids", "_ids_at", "_place", "_weights", "_weights_at", "_weights_slot")

    def __init__(self, place: Any):
        self._place = place
        ids, self._weights = _header.Tensor(), _header.Tensor()
        self._ids, self._weights_slot = (Slot(each, each, place.describe) for each in (ids, self._weights))
        self._ids_at, self._weights_at = ctypes.addressof(ids), ctypes.addressof(self._weights)

    def describe(self, ids: Any, weights: Any) -> tuple[int, int | None]:
        """Their addresses, as C takes them, until the next call of this. Raises InvalidArgument for weights that C
        would take for none at all."""
        self._ids.set(ids)
        if weights is None:
            return self._ids_at, None
        self._weights_slot.set(weights)
        if not self._weights.data and not self._weights.ndim:  # which to C are none: all 1
            seen = self._place.unlike(weights) or "a tensor that cannot be read, as in a transform of torch.func"
            raise InvalidArgument.of("weights", f"is {seen}")
        return self._ids_at, self._weights_at


def tensor_of(x: Any, describe: Describe = describe) -> _header.Tensor:
    """A descriptor of its own, for calls that are not on the way of a token."""
    tensor = _header.Tensor()
    pointer, meta = described(describe, x)
    ctypes.memmove(ctypes.addressof(tensor) + DTYPE_OFFSET, meta, len(meta))
    tensor.data = pointer
    return tensor


def unlike(x: Any) -> str | None:
    """What x is, if it is no tensor that a group on the CPU can take, whatever its dtype and shape. Raises nothing."""
    return legible(_unlike, x)


def _unlike(x: Any) -> str | None:
    if is_torch(x):
        return unlike_torch(x) if x.is_cpu else f"a {x.device} tensor; this group is on the CPU"
    if isinstance(x, np.ndarray):
        return unlike_array(x)
    return f"of type {type(x).__name__}; it must be a NumPy array or a PyTorch tensor"


def unwritable(name: str, x: Any) -> InvalidArgument | None:
    """Why nothing can be written to a tensor whose descriptor is as good as any."""
    if isinstance(x, np.ndarray):
        return None if x.flags.writeable else InvalidArgument.of(name, "is read-only")
    return unwritable_torch(name, x) if is_torch(x) else None


def unwritable_torch(name: str, x: Any) -> InvalidArgument | None:
    """Why a tensor of PyTorch may not be written to: by the rules of its own operations in place."""
    if not (x.requires_grad or x.is_inference()):
        return None
    torch = sys.modules["torch"]
    if x.is_inference():
        if torch.is_inference_mode_enabled():
            return None
        return InvalidArgument.of(
            name, "is an inference tensor, which outside of torch.inference_mode nothing may change"
        )
    if torch.is_grad_enabled():
        if x.is_leaf:
            return InvalidArgument.of(
                name, "is a leaf that requires gradients; write to its detach(), or under no_grad"
            )
        if x._base is not None and x._base.is_leaf:
            return InvalidArgument.of(name, "is a view of a leaf that requires gradients; write to its detach()")
    return None


def is_plain(x: Any) -> bool:
    """Whether x, whose type is PyTorch's own, is an ordinary tensor that anybody may write to: what `unlike_torch` and
    `unwritable_torch` ask, in a fifth of the time. False says nothing."""
    try:
        return bool(
            x.layout is sys.modules["torch"].strided
            and x.data_ptr()
            and not (x.requires_grad or x.is_neg() or x.is_inference())
        )
    except Exception:  # a tensor without memory, as in a transform of torch.func
        return False


def problem_of_output(name: str, x: Any) -> InvalidArgument | None:
    """Why nothing can be written to x, as far as a descriptor does not tell it."""
    if type(x) is _tensor_type and x.is_cpu and is_plain(x):
        return None
    what = unlike(x)
    return unwritable(name, x) if what is None else refusal(name, what, obstacle(describe, x))


def refusal(name: str, what: str, cause: BaseException | None = None) -> InvalidArgument:
    """Of an argument for what it is. cause: what it raised when it was asked."""
    error = InvalidArgument.of(name, f"is {what}")
    error.__cause__ = cause
    return error


def is_viewed(block: np.ndarray) -> bool:
    """Whether anything but the caller's one reference to a block of `aligned_bytes` shows its memory."""
    owner = block.base  # all views, views of views too, refer to the array that owns the memory
    return sys.getrefcount(owner) > 3  # block.base, `owner`, and the argument here


def block_of(memory: Any) -> np.ndarray:
    """A caller's block of bytes as uint8[n], without a copy; InvalidArgument for what is none."""
    what = unlike(memory)
    if what is None and is_torch(memory) and (problem := unwritable_torch("memory", memory)) is not None:
        raise problem
    if what is None:
        array = memory.detach().numpy() if is_torch(memory) and dtype_of(memory) == "uint8" else memory
        if dtype_of(array) != "uint8":
            what = f"of dtype {dtype_of(array)}"
        elif not array.flags.c_contiguous:
            what = "not contiguous"
        elif not array.flags.writeable:
            what = "read-only"
        else:
            return array.reshape(-1)
    raise InvalidArgument.of("memory", f"is {what}; it must be a contiguous, writable tensor of uint8")


def dtype_of(x: Any) -> str:
    """The name of a tensor's dtype."""
    return str(x.dtype).removeprefix("torch.")


def aligned_bytes(count: int, alignment: int = 64) -> np.ndarray:
    """uint8[count] at an aligned address."""
    raw = np.empty(count + alignment, np.uint8)
    begin = -raw.ctypes.data % alignment
    return raw[begin : begin + count]


def to_keep(torch: Any) -> Any:
    """A context for making views that are kept: one made under inference_mode could not be trained with later, nor one
    made under no_grad be changed in place then. To leave these takes longer than to make a view, so nobody does who is
    in neither."""
    if torch.is_inference_mode_enabled():
        return torch.inference_mode(False)
    return nullcontext() if torch.is_grad_enabled() else torch.enable_grad()


def to_torch(array: np.ndarray) -> Any:
    """The same memory as a PyTorch tensor; dtypes that NumPy does not know go through their bits."""
    import torch

    dtype = array.dtype
    with to_keep(torch):
        # NumPy's own are asked for no name: that takes longer than all the rest.
        if dtype.kind == "V" or (dtype.isbuiltin != 1 and hasattr(ml_dtypes, dtype.name)):
            bits = array.view(np.uint8 if array.itemsize == 1 else np.int16)
            return torch.from_numpy(bits).view(getattr(torch, dtype.name))
        return torch.from_numpy(array)


class _Kept:
    """Memory as `np.asarray` takes it: what keeps it lives as long as the array, and all views of that."""

    def __init__(self, pointer: int, count: int, keep: Any):
        self.keep = keep
        self.__array_interface__ = {"shape": (count,), "typestr": "|u1", "data": (pointer, False), "version": 3}


class Host:
    """Where the tensors of a group are: here, on the CPU. `cuda.Cuda` is its like; groups and handles use either."""

    reusable = True  # blocks for handles, as a new one costs page faults, more than the rest of a route
    learns_late = False  # of a peer's refusal: after the call has returned
    describe = staticmethod(describe)
    unlike = staticmethod(unlike)
    new_block = staticmethod(aligned_bytes)
    block_of = staticmethod(block_of)
    unwritable = staticmethod(unwritable)
    problem_of_output = staticmethod(problem_of_output)

    @staticmethod
    def stream() -> int:
        """There is none."""
        return 0

    @staticmethod
    def address(block: np.ndarray) -> int:
        """Of a block for a handle."""
        return _address(block)

    @staticmethod
    def block_view(block: np.ndarray, begin: int, shape: tuple[int, ...], name: str, torch: bool) -> Any:
        """A view of a part of a block, which it keeps alive. torch: of one as `shared` has it."""
        dtype = numpy_dtype(name)
        part = block[begin : begin + math.prod(shape) * dtype.itemsize]
        if torch:
            with to_keep(sys.modules["torch"]):
                return part.view(getattr(sys.modules["torch"], name)).view(shape)
        return part.view(dtype).reshape(shape)

    @staticmethod
    def shared(block: np.ndarray) -> Any:
        """A block as a tensor of PyTorch, whose views have one version."""
        return to_torch(block[:])  # not the block itself, that `is_viewed` may see it

    @staticmethod
    def window_view(pointer: int, shape: tuple[int, ...], name: str, torch: bool, keep: Any) -> Any:
        """A view of memory that the C library owns. keep: what keeps that memory; lives as long as the view, and views
        of it."""
        dtype = numpy_dtype(name)
        count = math.prod(shape)
        if count == 0 or pointer == 0:
            array = np.empty(shape, dtype)
        else:
            array = np.asarray(_Kept(pointer, count * dtype.itemsize, keep)).view(dtype).reshape(shape)
        return to_torch(array) if torch else array

    @staticmethod
    def empty(shape: tuple[int, ...], name: str, like: Any) -> Any:
        """A new tensor of the kind that `like` is."""
        if is_torch(like):
            torch = sys.modules["torch"]
            return torch.empty(shape, dtype=getattr(torch, name), device="cpu")
        return np.empty(shape, numpy_dtype(name))
