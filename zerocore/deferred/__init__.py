"""Models whose large tensors get memory when `zerocore.shard` takes them over."""

from zerocore.deferred.blank import heap
from zerocore.deferred.construct import (
    deferred,
    forget,
    is_blank,
    place_of,
    refuse_inside_build,
    tape_of,
)

__all__ = [
    "deferred",
    "forget",
    "heap",
    "is_blank",
    "place_of",
    "refuse_inside_build",
    "tape_of",
]
