"""Training runs: configuration, loop, checkpoints and guard."""

from typing import TYPE_CHECKING

from dither.lazy import lazily

if TYPE_CHECKING:
    from dither.train.config import Config as Config
    from dither.train.config import Parallel as Parallel
    from dither.train.config import Policy as Policy
    from dither.train.config import schedule as schedule
    from dither.train.guard import Guard as Guard
    from dither.train.guard import Signals as Signals
    from dither.train.loop import Outcome as Outcome
    from dither.train.loop import train as train
    from dither.train.records import Progress as Progress
    from dither.train.run_folder import Status as Status

__getattr__ = lazily(
    __name__,
    {
        "config": "Config Parallel Policy schedule",
        "guard": "Guard Signals",
        "loop": "Outcome train",
        "records": "Progress",
        "run_folder": "Status",
    },
)
