"""SNIP: choose the precision of each layer by its estimated effect on training."""

from typing import Any

from dither.errors import renamed
from dither.snip.baselines import BASELINES as BASELINES
from dither.snip.controller import Decision as Decision
from dither.snip.controller import Snip as Snip
from dither.snip.divergence import Scores as Scores
from dither.snip.dry_run import pipelined as pipelined
from dither.snip.fp8_auto import auto_plan as auto_plan
from dither.snip.options import Option as Option
from dither.snip.options import options as options
from dither.snip.planning import build_plan as build_plan
from dither.snip.planning import choose as choose
from dither.snip.probes import score as score
from dither.snip.savings import Times as Times
from dither.snip.savings import efficiency as efficiency
from dither.snip.savings import measure_times as measure_times
from dither.snip.savings import read_times as read_times
from dither.snip.settings import PROBES as PROBES
from dither.snip.settings import Estimator as Estimator
from dither.snip.settings import Goal as Goal
from dither.snip.settings import Schedule as Schedule
from dither.snip.settings import TrainingSetup as TrainingSetup
from dither.snip.solver import Solution as Solution
from dither.snip.solver import frontier as frontier
from dither.snip.solver import largest_target as largest_target
from dither.snip.solver import solve as solve
from dither.snip.statistics import LayerStatistics as LayerStatistics
from dither.snip.statistics import Statistics as Statistics
from dither.snip.statistics import collecting as collecting
from dither.snip.update_rules import AdagradRule as AdagradRule
from dither.snip.update_rules import AdamRule as AdamRule
from dither.snip.update_rules import MuonRule as MuonRule
from dither.snip.update_rules import RmspropRule as RmspropRule
from dither.snip.update_rules import SgdRule as SgdRule
from dither.snip.update_rules import UpdateRule as UpdateRule
from dither.snip.update_rules import update_rules_of as update_rules_of
from dither.snip.verification import Verification as Verification
from dither.snip.verification import verify as verify

_RENAMED = {"Moments": "AdamRule", "moments_of": "update_rules_of", "plan": "build_plan"}


def __getattr__(name: str) -> Any:
    return globals()[renamed("dither.snip", _RENAMED, name)]
