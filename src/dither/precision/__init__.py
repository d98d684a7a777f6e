"""Cast, Sampling, LayerPrecision and Plan: the precision of a tensor, a layer and a model as frozen data.

Nothing here imports torch.

>>> cast = Cast.parse("e2m1 tile(32) pow2")
>>> cast == Cast(format="e2m1", granularity="tile(32)", scale="pow2")
True
>>> print(cast)
e2m1 tile(32) pow2 nearest
"""

from dither.precision.cast import EXAMPLES as EXAMPLES
from dither.precision.cast import FIELDS as FIELDS
from dither.precision.cast import GROUP_SIZES as GROUP_SIZES
from dither.precision.cast import NAMED_CASTS as NAMED_CASTS
from dither.precision.cast import Cast as Cast
from dither.precision.cast import Granularity as Granularity
from dither.precision.cast import Rounding as Rounding
from dither.precision.cast import Scale as Scale
from dither.precision.checks import did_you_mean as did_you_mean
from dither.precision.layer import OPERANDS as OPERANDS
from dither.precision.layer import PRODUCTS as PRODUCTS
from dither.precision.layer import SAMPLINGS as SAMPLINGS
from dither.precision.layer import UNCAST as UNCAST
from dither.precision.layer import LayerPrecision as LayerPrecision
from dither.precision.layer import Override as Override
from dither.precision.memory import SWIGLU_CAST as SWIGLU_CAST
from dither.precision.memory import Hold as Hold
from dither.precision.memory import MemoryOptions as MemoryOptions
from dither.precision.memory import Save as Save
from dither.precision.patterns import matches as matches
from dither.precision.plan import COMPUTE as COMPUTE
from dither.precision.plan import PLAN_KEYS as PLAN_KEYS
from dither.precision.plan import PLAN_VERSION as PLAN_VERSION
from dither.precision.plan import Plan as Plan
from dither.precision.sampling import BEYOND as BEYOND
from dither.precision.sampling import GUIDES as GUIDES
from dither.precision.sampling import MOST_BITS as MOST_BITS
from dither.precision.sampling import NOISES as NOISES
from dither.precision.sampling import PARTS as PARTS
from dither.precision.sampling import SAMPLING_BLOCKS as SAMPLING_BLOCKS
from dither.precision.sampling import BitwidthLoss as BitwidthLoss
from dither.precision.sampling import Sampling as Sampling
from dither.precision.sampling import WeightDecay as WeightDecay
