"""Training runs: configuration, loop, checkpoints and guard."""

from dither.train import checkpoint as checkpoint
from dither.train import config as config
from dither.train import guard as guard
from dither.train import sharded as sharded
from dither.train.checkpoint import Saver as Saver
from dither.train.config import Config as Config
from dither.train.config import Parallel as Parallel
from dither.train.config import schedule as schedule
from dither.train.guard import Guard as Guard
from dither.train.guard import Policy as Policy
from dither.train.guard import Signals as Signals
from dither.train.guard import Status as Status
from dither.train.loop import Outcome as Outcome
from dither.train.loop import train as train
from dither.train.progress import Progress as Progress
from dither.train.sharded import ShardedSaver as ShardedSaver
from dither.train.state import Resumed as Resumed
from dither.train.state import pack as pack
from dither.train.state import pack_sharded as pack_sharded
from dither.train.state import unpack as unpack
