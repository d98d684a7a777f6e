"""Files that a user names: read whole, in bounded time and memory, whatever lies at the path."""

import os
import stat
from pathlib import Path

MOST = 64 << 20
"""The most bytes of a config, a plan or a tokenizer; the largest tokenizers have half as many."""


def read_text(path: str | Path) -> str:
    """The text of a regular file; anything else is an OSError or, where it is not UTF-8 or no path, a ValueError.

    A pipe would be waited for and a device never ends, so neither is read. Links are followed: the user named them.

    >>> read_text("/dev/null")
    Traceback (most recent call last):
    OSError: it is not a regular file
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError("it is not a regular file")
    with open(handle, "rb") as file:
        data = file.read(MOST + 1)
    if len(data) > MOST:
        raise OSError(f"it has more than {MOST >> 20} MiB")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not UTF-8 text (byte {data[error.start]:#04x} at {error.start:,})") from None
