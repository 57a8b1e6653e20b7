"""Expert placement: plans that even out what ranks carry, the loads to try them on, and what online use would give.

    from tokenway import balance

    plan = balance.plan(loads, ranks=32, slots=9)            # loads [layers, experts], 288 slots
    plan.physical_to_logical, plan.imbalance, plan.bound_imbalance
    later = balance.plan(new_loads, ranks=32, slots=9, old=plan, writes=16)
    later.moves                                              # which slot gets which expert, and from where

docs/BALANCING.md is the guide. Nothing here needs PyTorch; its tensors are taken where they are given.
"""

from tokenway.balance.balancer import Balancer, Statistics
from tokenway.balance.forecast import Forecast
from tokenway.balance.given import SlotMaps, slot_maps
from tokenway.balance.planner import (
    Plan,
    contiguous,
    imbalance,
    moves_between,
    plan,
    rank_loads,
    rebalance_experts,
)
from tokenway.balance.playing import Played, play, spare_maps
from tokenway.balance.replicas import Replicas
from tokenway.balance.simulation import Outcome, replay, rows_between_nodes, sampled_imbalance
from tokenway.balance.traces import Recording, read
from tokenway.balance.trained import trained
from tokenway.balance.training import TrainingBalancer
from tokenway.balance.weights import Weights, weight_bytes
from tokenway.balance.workloads import dirichlet, domains, drifting, group_limited, lognormal, sample, zipf

__all__ = [
    "Balancer",
    "Forecast",
    "Outcome",
    "Plan",
    "Played",
    "Recording",
    "Replicas",
    "SlotMaps",
    "Statistics",
    "TrainingBalancer",
    "Weights",
    "contiguous",
    "dirichlet",
    "domains",
    "drifting",
    "group_limited",
    "imbalance",
    "lognormal",
    "moves_between",
    "plan",
    "play",
    "rank_loads",
    "read",
    "rebalance_experts",
    "replay",
    "rows_between_nodes",
    "sample",
    "sampled_imbalance",
    "slot_maps",
    "spare_maps",
    "trained",
    "weight_bytes",
    "zipf",
]
