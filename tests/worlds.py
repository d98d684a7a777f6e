"""Processes for tests: groups of them (gloo) for distributed code, and single ones to be killed or to end by a signal.

They are forked from a server that has imported torch and dither already: starting one takes milliseconds instead of seconds, so
that every check can be a test of its own, in processes of its own.
"""

import datetime
import io
import multiprocessing.forkserver as forkserver
import os
import runpy
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

TIMEOUT = 60

PRELOADED = [
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "torch.nn.parallel",
    "torch._dynamo",
    "dither.cli",
    "dither.snip",
    "dither.train",
    "pytest",
    "scipy.optimize",  # SNIP's solver and its verification
    "scipy.stats",
]

needs_gloo = pytest.mark.skipif(
    not dist.is_available() or not dist.is_gloo_available(), reason="needs torch.distributed with gloo"
)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def server() -> Any:
    """Return the context of multiprocessing whose processes are forked from the server, which is started if needed."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    # The server does not get our sys.path, only our environment.
    with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, sys.path))):
        forkserver.ensure_running()
    return context


def start(function: Callable[..., None], arguments: tuple[Any, ...], size: int) -> mp.ProcessContext:
    """Start `size` processes that call `function(rank, *arguments)`."""
    server()
    return mp.start_processes(function, arguments, nprocs=size, join=False, start_method="forkserver")


def environment(rank: int, size: int, port: int) -> None:
    """Set up this process as torchrun would, with one thread."""
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size))


def wait(context: mp.ProcessContext, seconds: float = 2 * TIMEOUT) -> None:
    """Wait for all processes. Raise what one of them raised; kill them if they take too long."""
    end = time.monotonic() + seconds
    while not context.join(timeout=max(end - time.monotonic(), 0)):
        if time.monotonic() > end:
            for process in context.processes:
                process.kill()
            pytest.fail(f"{len(context.processes)} processes were not done in {seconds} s")


def _work(rank: int, size: int, port: int, checks: list[Callable[[], None]]) -> None:
    environment(rank, size, port)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=TIMEOUT))
    for check in checks:
        check()
        dist.barrier()
    dist.destroy_process_group()


def spread(size: int, *checks: Callable[[], None]) -> None:
    """Run functions in `size` processes, one after the other."""
    wait(start(_work, (size, free_port(), list(checks)), size))


def from_first(make: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Call a function in the first process of a world alone, and return its result in all of them."""
    file = io.BytesIO()
    if dist.get_rank() == 0:
        torch.save(make(*arguments, **options), file)  # pickle alone cannot read tensors of 8-bit types
    data = [file.getvalue()]
    dist.broadcast_object_list(data, src=0)
    return torch.load(io.BytesIO(data[0]), weights_only=False)


def in_processes(size: int, *checks: Callable[[], None], marks: Any = ()) -> list[Any]:
    """Return pytest parameters `(size, check)` named after the check, for `spread`."""
    return [pytest.param(size, check, id=f"{size}-{check.__name__.removeprefix('check_')}", marks=marks) for check in checks]


# A single process -----------------------------------------------------------------------------------------------------


class Forked:
    """A process that calls `function(*arguments)` and exits with what it returns; like `subprocess.Popen` with one pipe.

    `stdout` has both its standard output and its standard error.
    """

    def __init__(self, function: Callable[..., int | None], *arguments: Any) -> None:
        reader, writer = mp.Pipe(duplex=False)
        self.process = server().Process(target=_redirected, args=(writer, function, arguments))
        self.process.start()
        writer.close()
        self.stdout = os.fdopen(os.dup(reader.fileno()), encoding="utf-8")
        reader.close()

    def send_signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        self.process.kill()

    def communicate(self) -> str:
        """Wait for the end of the process. Return what it printed and was not read yet."""
        with self.stdout:
            rest = self.stdout.read()
        self.process.join()
        return rest

    @property
    def returncode(self) -> int | None:
        return self.process.exitcode


def _redirected(writer: Any, function: Callable[..., int | None], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    os.dup2(writer.fileno(), 1)
    os.dup2(writer.fileno(), 2)
    writer.close()
    sys.stdout, sys.stderr = (io.TextIOWrapper(io.FileIO(number, "w"), "utf-8", line_buffering=True) for number in (1, 2))
    sys.exit(function(*arguments))


def run_program(path: Path, folder: Path, *arguments: str) -> None:
    """Run a file as a program in this process, in a folder that is also its first argument."""
    os.chdir(folder)
    sys.argv = [str(path), str(folder), *arguments]
    runpy.run_path(str(path), run_name="__main__")


def forked(function: Callable[..., int | None], *arguments: Any) -> tuple[int, str]:
    """Call a function in a process of its own. Return its exit code, negative for a signal, and what it printed."""
    process = Forked(function, *arguments)
    said = process.communicate()
    assert process.returncode is not None
    return process.returncode, said
