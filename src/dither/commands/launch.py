"""Start several ranks of a command on this machine, by torch's elastic launcher, which torchrun uses as well."""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dither.errors import UserError

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

MOST = 1024
"""Most ranks on one machine."""

LEAVING = 60
"""Seconds that ranks have to save and end after a signal before they are killed."""


def launch(count: int, words: Sequence[str]) -> int:
    """Run `dither` with these words on `count` ranks, and return its exit code.

    Rank 0 has the console. The other ranks write to files that are removed at the end; if one of them fails by itself, the last
    lines of its output are printed. SIGINT and SIGTERM are passed on to all ranks, and their exit code is returned.

    Args:
        count: Number of ranks.
        words: The arguments of `dither`, such as ["train", "run.toml"].
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, launch_agent

    if not 1 <= count <= MOST:
        raise UserError(f"--nproc is a number of ranks from 1 to {MOST}, not {count}.")
    if "TORCHELASTIC_RUN_ID" in os.environ or os.environ.get("WORLD_SIZE", "1") != "1":
        raise UserError("--nproc starts ranks, and torchrun has started this process as one already: use only one of them.")
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // count)))
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # failures are reported here
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # a lost store is a warning with a stack of C++ in it
    with tempfile.TemporaryDirectory(prefix="dither-ranks-") as folder:
        others = {rank: Std.NONE if rank == 0 else Std.ALL for rank in range(count)}
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=count,
            logs_specs=DefaultLogsSpecs(log_dir=folder, redirects=others),
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            max_restarts=0,
            shutdown_timeout=LEAVING,
        )
        try:
            launch_agent(config, sys.executable, ["-m", "dither.cli", *words])
        except ChildFailedError as error:
            return _failed(error.failures, Path(folder))
        except SignalException as told:
            return 128 + told.sigval.value
    return 0


def _failed(failures: Mapping[int, ProcessFailure], folder: Path) -> int:
    """Return the exit code of the first rank that failed, after printing its last lines unless rank 0 has spoken."""
    rank, first = min(failures.items(), key=lambda item: (item[1].timestamp, item[0]))
    spoken = [failure.exitcode for failure in failures.values() if failure.exitcode > 0]
    if rank != 0 and not (0 in failures and failures[0].exitcode > 0):
        for path in sorted(folder.glob(f"*/attempt_0/{rank}/stderr.log")):
            lines = path.read_text(errors="replace").splitlines()[-30:]
            print("\n".join(lines), file=sys.stderr, end="\n" if lines else "")
    if not spoken:
        name = signal.Signals(-first.exitcode).name
        print(f"dither: error: Rank {rank} (process {first.pid}) was ended by {name}: resume with --resume.", file=sys.stderr)
        return 1
    return first.exitcode if first.exitcode > 0 else spoken[0]
