"""Machines: constants of a card, of the links within a domain, and of the network between domains.

Each number has a unit and says where it comes from: `measured` in a file of bench/results on two GPUs, `published` by
somebody else, or `assumed` because nobody has said it. What is assumed can be given anew on the command line.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tokenway.planning.fitted import CARDS
from tokenway.planning.fitting import Card, Rate

MOST_GPUS = 2048
MEASURED, PUBLISHED, ASSUMED = "measured", "published", "assumed"


@dataclass(frozen=True)
class Constant:
    """A number of a machine. kind: MEASURED, PUBLISHED or ASSUMED."""

    value: float
    unit: str
    kind: str
    source: str


@dataclass(frozen=True)
class Machine:
    """domain: GPUs that NVLink joins. nic_gb_s: of a GPU's network card in one direction. nic_share: which part of it
    rows reach. nic_us: a put one way, without its bytes. put_us: what posting a put or an add takes, one after
    the other. link: what NVLink does against that of the measured card."""

    name: str
    card: Card
    domain: int
    nic_gb_s: Constant
    nic_share: Constant
    nic_us: Constant
    put_us: Constant
    link: Constant

    def rate(self, step: str, packets: bool) -> Rate:
        """Of a step within a domain."""
        found = self.card.rate(step, packets)
        return replace(found, gb_s=found.gb_s * self.link.value)

    @property
    def read_gb_s(self) -> float:
        """Of ranks that read from their mates."""
        return self.card.get_gb_s * self.link.value

    @property
    def network_gb_s(self) -> float:
        """Of rows between domains."""
        return self.nic_gb_s.value * self.nic_share.value

    def constants(self) -> dict[str, Constant]:
        """Those that are not the card's."""
        return {
            "network card": self.nic_gb_s,
            "of it for rows": self.nic_share,
            "put one way": self.nic_us,
            "posting a put": self.put_us,
            "NVLink, of the measured card's": self.link,
        }


_CX7 = Constant(
    50.0, "GB/s", PUBLISHED, "ConnectX-7, 400 Gbit/s for each GPU, as NCCL EP's table VI and DeepEP's README have"
)
_SHARE = Constant(0.92, "", PUBLISHED, "46 of 50 GB/s, of DeepEP V1's combine of 64 ranks (docs/legacy.md)")
_GIN = Constant(8.35, "us", PUBLISHED, "half of NCCL GIN's 16.7 us there and back by GDAKI, arXiv 2511.15076")
_POST = Constant(0.1, "us", ASSUMED, "a put that a GPU posts; a CPU proxy may take 1")
_SAME = Constant(1.0, "", MEASURED, "the card that was measured")
_NVLINK5 = Constant(2.0, "", PUBLISHED, "900 GB/s for 450 in one direction; TensorRT-LLM reaches 740 of them")

MACHINES: dict[str, Machine] = {
    "h100-cx7": Machine("h100-cx7", CARDS["H100"], 8, _CX7, _SHARE, _GIN, _POST, _SAME),
    "h200-cx7": Machine("h200-cx7", CARDS["H200"], 8, _CX7, _SHARE, _GIN, _POST, _SAME),
    # No constant of it was measured: it is an H200 with links twice as fast.
    "gb200-nvl72": Machine("gb200-nvl72", CARDS["H200"], 72, _CX7, _SHARE, _GIN, _POST, _NVLINK5),
}


def given(machine: Machine, **values: float | None) -> Machine:
    """With some numbers of the caller's, by their names here; None leaves what is there. domain is an int."""
    found = {name: value for name, value in values.items() if value is not None}
    domain = int(found.pop("domain", machine.domain))
    changed = {
        name: replace(getattr(machine, name), value=value, kind=ASSUMED, source="given")
        for name, value in found.items()
    }
    return replace(machine, domain=domain, **changed)
