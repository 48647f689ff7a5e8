"""The library's logger: `logging.getLogger("fusedring")`, which speaks on rank 0 alone."""

import logging
import os

import torch.distributed as dist


def _is_spokesman(_: logging.LogRecord) -> bool:
    """Rank 0 speaks; all ranks do with FUSEDRING_LOG_ALL_RANKS=1."""
    if os.environ.get("FUSEDRING_LOG_ALL_RANKS") == "1":
        return True
    return my_rank() == 0


def my_rank() -> int:
    """This process's rank in the default group, or as its launcher said; 0 for a lone process."""
    if dist.is_initialized():
        return dist.get_rank()
    said = os.environ.get("RANK", "")
    return int(said) if said.isdigit() else 0


logger = logging.getLogger("fusedring")
logger.addFilter(_is_spokesman)
