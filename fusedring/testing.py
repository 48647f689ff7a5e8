"""For tests: all ranks of a group in one process, on one GPU or under Triton's interpreter (see `virtual_ranks`)."""

from fusedring.engines.virtual_ranks import CHANNELS, VirtualCollective, VirtualRanks, virtual_ranks

__all__ = ["CHANNELS", "VirtualCollective", "VirtualRanks", "virtual_ranks"]
