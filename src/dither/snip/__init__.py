"""SNIP: choose the precision of each layer by its estimated effect on training.

Settings and options are imported at once; the other names when they are first used, since they need torch.
"""

from typing import TYPE_CHECKING

from dither.lazy import lazily
from dither.snip.options import Option as Option
from dither.snip.options import options as options
from dither.snip.settings import PROBES as PROBES
from dither.snip.settings import Estimator as Estimator
from dither.snip.settings import Goal as Goal
from dither.snip.settings import Schedule as Schedule
from dither.snip.settings import SnipSettings as SnipSettings

if TYPE_CHECKING:
    from dither.snip.controller import Decision as Decision
    from dither.snip.controller import Snip as Snip
    from dither.snip.divergence import Scores as Scores
    from dither.snip.dry_run import TrainingSetup as TrainingSetup
    from dither.snip.dry_run import pipelined as pipelined
    from dither.snip.fp8_auto import auto_plan as auto_plan
    from dither.snip.planning import build_plan as build_plan
    from dither.snip.planning import choose as choose
    from dither.snip.probes import score as score
    from dither.snip.savings import LayerTimes as LayerTimes
    from dither.snip.savings import efficiency as efficiency
    from dither.snip.savings import measure_times as measure_times
    from dither.snip.savings import read_times as read_times
    from dither.snip.solver import Solution as Solution
    from dither.snip.solver import frontier as frontier
    from dither.snip.solver import largest_target as largest_target
    from dither.snip.solver import solve as solve
    from dither.snip.statistics import LayerStatistics as LayerStatistics
    from dither.snip.statistics import Statistics as Statistics
    from dither.snip.statistics import collecting as collecting
    from dither.snip.update_rules import update_rules_of as update_rules_of

__getattr__ = lazily(
    __name__,
    {
        "controller": "Decision Snip",
        "divergence": "Scores",
        "dry_run": "TrainingSetup pipelined",
        "fp8_auto": "auto_plan",
        "planning": "build_plan choose",
        "probes": "score",
        "savings": "LayerTimes efficiency measure_times read_times",
        "solver": "Solution frontier largest_target solve",
        "statistics": "LayerStatistics Statistics collecting",
        "update_rules": "update_rules_of",
    },
)
