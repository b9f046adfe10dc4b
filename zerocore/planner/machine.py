"""How fast a machine computes and sends: the costs of a simulation."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

from zerocore.planner.activity import Cost


@dataclass(frozen=True)
class Machine:
    """Rates of a rank and of what connects it with others, all of them achievable ones.

    Attributes:
        flops: of matrix products, flop/s of a rank.
        others: bytes/s that a model's other operations read and write; infinite: they cost nothing
            beside the products.
        memory: bytes/s of reading and writing alone: packing, sums, the optimizer.
        operation: seconds that each operation takes besides.
        network: bytes/s that a node sends to others, all its ranks together, in one direction.
        intra: bytes/s that a rank sends to others of its node, in one direction.
        latency, intra_latency: seconds of each step of a collective between nodes, and inside one;
            by default those of NCCL's model of rings (9.6 and 3.4 us).
        ranks_per_node: of all the ranks.
        cores: that the ranks of a node share, for computing and for sending; None: each rank has a
            device, and its collectives take nothing from what it computes.
    """

    flops: float
    network: float
    intra: float
    ranks_per_node: int
    others: float = math.inf
    memory: float = math.inf
    operation: float = 0.0
    latency: float = 9.6e-6
    intra_latency: float = 3.4e-6
    cores: int | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "cores" and value is None:
                continue
            least = 0.0 if field.name in ("operation", "latency", "intra_latency") else None
            number = isinstance(value, int | float) and not math.isnan(value)
            if not number or value < 0 or (value == 0 and least is None):
                raise ValueError(f"{field.name}: expected a positive number, got {value!r}")

    def with_ranks(self, ranks_per_node: int) -> Machine:
        """The same with another number of ranks on a node."""
        return replace(self, ranks_per_node=ranks_per_node)

    def compute_seconds(self, cost: Cost) -> float:
        """Of a part of a step, for a rank that has a core or a device for itself."""
        return (
            cost.flops / self.flops + cost.traffic / self.others + cost.operations * self.operation
        )

    def link(self, ranks: int) -> str:
        """What a collective of so many neighbouring ranks is bounded by."""
        return "network" if ranks > self.ranks_per_node else "intra" if ranks > 1 else ""

    def gather_seconds(self, size: float, ranks: int, stride: int = 1) -> float:
        """Of an all-gather or a reduce-scatter.

        Alpha-beta costs of a ring (Thakur, Rabenseifner and Gropp 2005, section 4.1) on two levels:
        a node receives each byte that it lacks once, and of the ring's steps as many as there are
        other nodes cross the network (as NCCL's own model has it, src/graph/tuning.cc).

        Args:
            size: bytes of the whole buffer.
            ranks: of the group.
            stride: the group has each `stride`-th rank; the groups between send at the same time.
        """
        if ranks == 1 or size == 0:
            return 0.0
        local = min(ranks, max(1, self.ranks_per_node // stride))
        nodes = -(-ranks // local)
        inside = size * (local - 1) / local / self.intra
        together = min(self.ranks_per_node, stride) if nodes > 1 else 1
        across = size * (nodes - 1) / nodes * together / self.network
        steps = (nodes - 1) * self.latency + (ranks - nodes) * self.intra_latency
        return max(inside, across) + steps
