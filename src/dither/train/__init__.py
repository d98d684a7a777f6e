"""Training runs: configuration, loop, checkpoints and guard."""

from dither.checkpoint import sharded as sharded
from dither.checkpoint import write as write
from dither.checkpoint.sharded import ShardedSaver as ShardedSaver
from dither.checkpoint.state import Resumed as Resumed
from dither.checkpoint.state import pack as pack
from dither.checkpoint.state import pack_sharded as pack_sharded
from dither.checkpoint.state import unpack as unpack
from dither.checkpoint.write import Saver as Saver
from dither.train import config as config
from dither.train import guard as guard
from dither.train.config import Config as Config
from dither.train.config import Parallel as Parallel
from dither.train.config import schedule as schedule
from dither.train.guard import Guard as Guard
from dither.train.guard import Policy as Policy
from dither.train.guard import Signals as Signals
from dither.train.loop import Outcome as Outcome
from dither.train.loop import train as train
from dither.train.records import Progress as Progress
from dither.train.run_folder import Status as Status
