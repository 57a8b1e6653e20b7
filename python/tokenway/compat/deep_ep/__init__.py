"""The surface of DeepEP over Tokenway: code that calls `deep_ep` runs unchanged.

    from tokenway.compat import deep_ep as tokenway_deep_ep

    tokenway_deep_ep.install()  # before anything imports deep_ep
    import deep_ep  # is Tokenway now: for Megatron, vLLM, SGLang and one's own code

docs/FRAMEWORKS.md says which calls are served, and which are not.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from tokenway.compat.deep_ep import comm, installed
from tokenway.compat.deep_ep.buffer import Buffer
from tokenway.compat.deep_ep.config import Config, topk_idx_t
from tokenway.compat.deep_ep.elastic import ElasticBuffer, EPHandle
from tokenway.compat.deep_ep.ep import EPBuffer
from tokenway.compat.deep_ep.events import EventHandle, EventOverlap

__version__ = "2.1.0+tokenway"  # of the surface whose whole there is; EPBuffer is of 2.5
_NUMBERS = {name: getattr(comm, name) for name in dir(comm) if name.startswith("get_num_")}
_DOMAINS = {
    name: getattr(comm, name)
    for name in ("destroy_all_managed_nccl_comm", "get_logical_domain_size", "get_physical_domain_size")
}
_NAMES = {
    "Buffer": Buffer,
    "Config": Config,
    "EPBuffer": EPBuffer,
    "EPHandle": EPHandle,
    "ElasticBuffer": ElasticBuffer,
    "EventHandle": EventHandle,
    "EventOverlap": EventOverlap,
    "topk_idx_t": topk_idx_t,
    **_DOMAINS,
    **_NUMBERS,
}


def __getattr__(name: str) -> Any:
    raise AttributeError(
        f"deep_ep.{name} is not served by tokenway.compat.deep_ep, which has {', '.join(_NAMES)}; docs/FRAMEWORKS.md "
        "says what to use instead"
    )


def install() -> ModuleType:
    """Puts `deep_ep` and `deep_ep.utils`, with what frameworks import from them, into sys.modules of this process, and
    returns the first. Not collective; on every rank, and in each process that is started anew. Does nothing the second
    time. Errors: InvalidUsage if another deep_ep was imported before."""
    events = {"EventHandle": EventHandle, "EventOverlap": EventOverlap}
    names = _NAMES | {"__version__": __version__, "__getattr__": __getattr__}
    return installed.put(
        {
            "deep_ep": names,
            "deep_ep.buffer": {"Buffer": Buffer, "Config": Config} | events,
            "deep_ep.buffers": {},
            "deep_ep.buffers.legacy": {"Buffer": Buffer, "Config": Config},
            "deep_ep.buffers.elastic": {"ElasticBuffer": ElasticBuffer, "EPHandle": EPHandle},
            "deep_ep.buffers.ep": {"EPBuffer": EPBuffer, "EPHandle": EPHandle},
            "deep_ep.comm": _DOMAINS | {"barrier": comm.barrier, "get_comm_stream": comm.get_comm_stream},
            "deep_ep.utils": events,
            "deep_ep.utils.event": events,
        }
    )


def uninstall() -> None:
    """Takes them out of sys.modules; another deep_ep that is installed can be imported then. What others have imported
    stays with them."""
    installed.remove()
