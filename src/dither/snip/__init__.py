"""Choosing each layer's precision by what it does to training."""

from dither.snip.baselines import BASELINES as BASELINES
from dither.snip.controller import Decision as Decision
from dither.snip.controller import Snip as Snip
from dither.snip.divergence import Scores as Scores
from dither.snip.efficiency import Times as Times
from dither.snip.efficiency import efficiency as efficiency
from dither.snip.efficiency import measure_times as measure_times
from dither.snip.moments import Moments as Moments
from dither.snip.moments import moments_of as moments_of
from dither.snip.options import Option as Option
from dither.snip.options import options as options
from dither.snip.passes import pipelined as pipelined
from dither.snip.planning import Goal as Goal
from dither.snip.planning import choose as choose
from dither.snip.planning import plan as plan
from dither.snip.probes import PROBES as PROBES
from dither.snip.probes import score as score
from dither.snip.solve import Solution as Solution
from dither.snip.solve import frontier as frontier
from dither.snip.solve import largest_target as largest_target
from dither.snip.solve import solve as solve
from dither.snip.statistics import LayerStatistics as LayerStatistics
from dither.snip.statistics import Statistics as Statistics
from dither.snip.statistics import collecting as collecting
from dither.snip.verify import Verification as Verification
from dither.snip.verify import verify as verify
