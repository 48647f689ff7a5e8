"""What `auto` stands for, and why: which engine for tensors on a device, and which algorithm for how many bytes.

The choice of an algorithm is a list of rules in the order of sizes; the first one whose size suffices holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ONE_SHOT_BYTES = 32 << 10
"""Up to this tensor size 'auto' means one_shot, above it two_shot (see `fusedring bench --only all_reduce`)."""

ONE_SHOT_BYTES_ON_GPUS = 256 << 10
"""The same between GPUs: where torch's own selector changes (IntraNodeComm). Not measured here."""


@dataclass(frozen=True, slots=True)
class Choice:
    """An engine, and why this one."""

    engine: str
    why: str


@dataclass(frozen=True, slots=True)
class Rule:
    """Tensors of at most `up_to_bytes` bytes (None: of any size) are reduced by `algorithm`, because of `why`."""

    algorithm: str
    up_to_bytes: int | None
    why: str


ENGINES_BY_DEVICE = {
    "cpu": Choice("host", "tensors in host memory (ranks on one machine read each other's in shared memory)"),
    "cuda": Choice(
        "triton",
        "tensors on a GPU (kernels write to each other's memory; the first collective tries out how, and where they "
        "cannot the group's own backend reduces)",
    ),
}
"""By type of device."""


def rules_in_host_memory(one_shot_bytes: int = ONE_SHOT_BYTES) -> tuple[Rule, ...]:
    """For ranks that share host memory. one_shot_bytes: what they agreed on."""
    return (
        Rule("one_shot", one_shot_bytes, "fewest meetings"),
        Rule("two_shot", None, "fewest bytes, in fewer meetings than a ring"),
    )


def rules_on_gpus(world_size: int, *, full_mesh: bool) -> tuple[Rule, ...]:
    """For ranks on GPUs. full_mesh: whether every two of them have a link of their own."""
    small = Rule("one_shot", ONE_SHOT_BYTES_ON_GPUS, "fewest steps")
    # Both move the same bytes, two_shot in fewer steps; but where links are shared it meets itself on them.
    if world_size <= 2 or full_mesh:
        return small, Rule("two_shot", None, "fewest bytes, in fewer steps than a ring")
    return small, Rule("ring", None, "fewest bytes, and on shared links nobody meets another")


def algorithm_for(nbytes: int, rules: Sequence[Rule]) -> str:
    """The algorithm for a tensor of `nbytes` bytes."""
    return next(rule.algorithm for rule in rules if rule.up_to_bytes is None or nbytes <= rule.up_to_bytes)
