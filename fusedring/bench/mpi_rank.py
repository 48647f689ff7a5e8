"""One rank that mpiexec has started: it joins a group over gloo as well, so that both can take turns.

`mpiexec -n RANKS python -m fusedring.bench.mpi_rank FOLDER`: what to do is in the folder, and what came out goes there.
"""

from __future__ import annotations

import pickle
import sys
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fusedring.bench.ranks import TIMEOUT_SECONDS, write_shared_files
from fusedring.group.collectives import close


def main(folder: Path) -> None:
    """Run the task; end all ranks if it fails here."""
    world = _mpi_world()
    write_shared_files(folder, world.rank)
    try:
        torch.set_num_threads(1)
        store = dist.FileStore(str(folder / "store"), world.size)  # type: ignore[attr-defined]
        timeout = timedelta(seconds=TIMEOUT_SECONDS)
        dist.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size, timeout=timeout)
        function, arguments = pickle.loads((folder / "task").read_bytes())
        result = function(*arguments)
        close()
        dist.destroy_process_group()
        (folder / f"result-{world.rank}").write_bytes(pickle.dumps(result))
    except BaseException:
        (folder / f"error-{world.rank}").write_text(traceback.format_exc())
        world.Abort(1)


def _mpi_world() -> Any:
    """MPI's communicator of all ranks. One thread calls MPI: it need not guard itself against others, as by default."""
    import mpi4py

    mpi4py.rc.thread_level = "funneled"
    from mpi4py import MPI

    return MPI.COMM_WORLD


if __name__ == "__main__":
    main(Path(sys.argv[1]))
