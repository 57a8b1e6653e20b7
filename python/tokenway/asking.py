"""What a group does with the arguments of a dispatch or combine before it asks the C library: all of it may fail, and
none of it may keep the peers waiting (`arguments.Preparation`)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from tokenway import _header, arguments, outputs, tensors
from tokenway.errors import OutOfMemory, TokenwayError
from tokenway.handle import Handle, Tensor
from tokenway.structs import REFUSED, Structs

if TYPE_CHECKING:
    from tokenway.group import Group


def dispatch(
    group: Group,
    structs: Structs,
    handle: Any,
    tokens: Tensor,
    payloads: Any,
    layout: Any,
    bound: Any,
    lane: Any,
    out: Any,
    column_major: Collection[str] | None,
    count: bool,
    send_only: bool,
) -> tuple[Any, int, dict[str, Tensor], dict[str, Tensor], TokenwayError | None]:
    """Fills the structs of a dispatch. Returns (layout, bound, tensors to write to, payloads, what C cannot see)."""
    b, stream = 0, 0
    given: dict[str, Tensor] = {}
    sent: dict[str, Tensor] = {}
    with arguments.Preparation() as prepared:
        b = (0 if group.exact else group.max_tokens) if bound is None else arguments.int32(bound) or -2
        stream = 0 if group.device is None else group._stream_of(handle)
        structs.call(b, lane, send_only, count, stream)
        layout = layout or ("flat" if group.exact else "rank_major")
        structs.ask(layout)
        if out is not None:
            given = dict(out) if isinstance(out, Mapping) else {"tokens": out}
            if (problem := arguments.problem_of_outputs(group._place, given, structs.outputs)) is not None:
                raise problem
        if column_major is not None and (problem := outputs.choose_columns(group, structs, column_major)) is not None:
            raise problem
        if payloads is not None:
            if not isinstance(payloads, Mapping) or not payloads.keys() <= group._payload_specs.keys() - {"tokens"}:
                raise arguments.problem_of_payloads(payloads, group._extra_names)
            sent = dict(payloads)
        try:
            if layout in ("expert_major", "grouped"):
                outputs.add_by_expert(group, structs, handle, layout, b, given, tokens)
            elif isinstance(handle, Handle) and handle._landing is not None:
                group._copy_out(handle, given, tokens)
        except (MemoryError, RuntimeError) as error:
            raise OutOfMemory(f"no memory for the outputs: {error}") from error
        structs.tokens.set(tokens)
        for name in group._extra_names:
            structs.inputs[name].set(sent.get(name))
        for name, tensor in given.items():
            if tensor is not None and name in structs.outputs:
                structs.outputs[name].set(tensor)
    if prepared.problem is not None:
        # The peers wait on that lane, and take the refusal for what was called.
        structs.call(b, lane, arguments.truth(send_only), True, stream)
        structs.dispatch_out.layout = REFUSED
    return layout, b, given, sent, prepared.problem


def combine(
    group: Group,
    structs: Structs,
    handle: Any,
    rows: Tensor,
    weighting: Any,
    layout: Any,
    dtype: Any,
    out: Any,
    send_only: bool,
) -> tuple[Any, Tensor, TokenwayError | None]:
    """The same of a combine. Returns (layout, the tensor to write to, what C cannot see)."""
    code, weighted, stream, sends = REFUSED, 0, 0, False
    with arguments.Preparation() as prepared:
        stream = 0 if group.device is None else group._stream_of(handle)
        sends = bool(send_only)
        weighted = arguments.code(_header.WEIGHTINGS, weighting)
        if layout is None:
            layout = getattr(handle, "layout", None)
        if out is not None:
            if (problem := group._place.unwritable("out", out)) is not None:
                raise problem
        elif isinstance(handle, Handle):
            name = group.combine_dtype if dtype is None else tensors.dtype_name(dtype)
            try:
                out = group._place.empty((handle.tokens, group.combine_hidden), name, rows)
            except (MemoryError, RuntimeError) as error:
                raise OutOfMemory(f"no memory for the result: {error}") from error
        structs.rows.set(rows)
        structs.result.set(out)
        code = arguments.code(_header.LAYOUTS, layout)
    structs.call_combine(code if prepared.problem is None else REFUSED, weighted, sends, stream)
    return layout, out, prepared.problem
