"""Processes for tests: ranks that form a group (gloo), and single ones to be killed or to end by a signal.

All are forked from one server per test run, which has imported torch and dither already: starting one takes milliseconds.
"""

import datetime
import functools
import gc
import importlib
import inspect
import io
import multiprocessing.connection
import multiprocessing.forkserver as forkserver
import os
import re
import runpy
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import dither

TIMEOUT = 60

PACKAGE = Path(dither.__file__).parent
OURS = [path.relative_to(PACKAGE.parent).with_suffix("").as_posix().replace("/", ".") for path in PACKAGE.rglob("*.py")]

PRELOADED = [
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "torch.nn.parallel",
    "torch._dynamo",
    "pytest",
    "scipy.optimize",  # SNIP's solver
    "scipy.stats",
    *(name for name in OURS if not re.search(r"\b(integrations|triton|__main__)\b", name)),
    "worlds",
]
"""What processes find imported. Packages of dither import their modules when they are used, so each is named."""


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


# Ranks ----------------------------------------------------------------------------------------------------------------


class World:
    """Ranks that form a group and call functions, one after the other."""

    def __init__(self, size: int) -> None:
        port, context = free_port(), server()
        self.connections, self.processes = [], []
        for rank in range(size):
            here, there = context.Pipe()
            self.connections.append(here)
            self.processes.append(context.Process(target=_serve, args=(rank, size, port, there), daemon=True))
            self.processes[-1].start()
            there.close()

    def call(self, function: Callable[..., Any], arguments: tuple[Any, ...], seconds: float) -> list[Any]:
        found: dict[int, Any] = {}
        end = time.monotonic() + seconds
        for connection in self.connections:
            connection.send((function, arguments))
        while len(found) < len(self.connections):
            waiting = [connection for rank, connection in enumerate(self.connections) if rank not in found]
            ready = multiprocessing.connection.wait(waiting, max(end - time.monotonic(), 0))
            if not ready:
                pytest.fail(f"{len(self.connections)} ranks were not done in {seconds} s")
            for rank in map(self.connections.index, ready):
                try:
                    error, data = self.connections[rank].recv()
                except EOFError:
                    self.processes[rank].join()
                    pytest.fail(f"rank {rank} ended with {self.processes[rank].exitcode}")
                if error:
                    pytest.fail(f"rank {rank}: {error}")
                found[rank] = torch.load(io.BytesIO(data), weights_only=False)
        return [found[rank] for rank in range(len(self.connections))]

    def kill(self) -> None:
        for process, connection in zip(self.processes, self.connections, strict=True):
            process.kill()
            connection.close()
        for process in self.processes:
            process.join()


def _serve(rank: int, size: int, port: int, connection: Any) -> None:
    join_group(rank, size, port)
    random_state = torch.get_rng_state()
    while True:
        try:
            function, arguments = connection.recv()
        except EOFError:  # the test run is over
            os._exit(0)
        torch.set_rng_state(random_state)
        error, data = "", io.BytesIO()
        try:
            torch.save(function(*arguments), data)
            dist.barrier()
        except BaseException:
            error = traceback.format_exc()
        connection.send((error, data.getvalue()))


_WORLDS: dict[tuple[str, int], World] = {}


def ranks(size: int, function: Callable[..., Any], *arguments: Any, seconds: float = 2 * TIMEOUT) -> list[Any]:
    """Call a function in `size` processes that form a group. Return what each of them returns, or fail as one fails.

    The processes serve all calls of a test file, until one fails: what DTensor and FSDP2 prepare for their first operations
    takes longer than most tests. A function must leave the modules of its process as they were.
    """
    module = function.__module__ if function is not _body else arguments[0]
    for other in [key for key in _WORLDS if key[0] != module]:
        _WORLDS.pop(other).kill()
    world = _WORLDS.pop((module, size), None) or World(size)
    try:
        found = world.call(function, arguments, seconds)
    except BaseException:
        world.kill()
        raise
    _WORLDS[module, size] = world
    return found


def start_ranks(function: Callable[..., None], size: int, *arguments: Any) -> mp.ProcessContext:
    """Start processes that call `function(rank, size, port, *arguments)`, for tests that kill some of them."""
    server()
    return mp.start_processes(function, (size, free_port(), *arguments), nprocs=size, join=False, start_method="forkserver")


def set_up(rank: int, size: int, port: int) -> None:
    """Set up this process as torchrun would, with one thread."""
    gc.freeze()  # what the server imported: each collection would visit it, and copy its pages
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size))


def join_group(rank: int, size: int, port: int) -> None:
    """Set up this process and join the others."""
    set_up(rank, size, port)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=TIMEOUT))


def on_ranks(*sizes: int, exhaustive: Sequence[int] = ()) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run the body of a test in processes that form a group, for each of these numbers of ranks.

    >>> @on_ranks(2, exhaustive=(3, 8))
    ... def test_sums() -> None: ...
    """
    every = [*sizes, *(pytest.param(size, marks=pytest.mark.exhaustive) for size in exhaustive)]

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        def test(*, size: int, **arguments: Any) -> None:
            ranks(size, _body, body.__module__, body.__name__, arguments)

        parameters = inspect.signature(body).parameters.values()
        functools.update_wrapper(test, body)
        test.__signature__ = inspect.Signature([inspect.Parameter("size", inspect.Parameter.KEYWORD_ONLY), *(
            parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in parameters
        )])  # fmt: skip
        return pytest.mark.parametrize("size", every, ids="{} ranks".format)(test)

    return decorate


def _body(module: str, name: str, arguments: dict[str, Any]) -> None:
    """Call the body of a test, which has the name of the test itself."""
    getattr(importlib.import_module(module), name).__wrapped__(**arguments)


def from_first(make: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Call a function in the first rank alone, and return its result in all of them."""
    file = io.BytesIO()
    if dist.get_rank() == 0:
        torch.save(make(*arguments, **options), file)  # pickle alone cannot read tensors of 8-bit types
    data = [file.getvalue()]
    dist.broadcast_object_list(data, src=0)
    return torch.load(io.BytesIO(data[0]), weights_only=False)


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
    gc.freeze()
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
