"""Cast, Sampling, LayerPrecision and Plan: the precision of a tensor, a layer and a model as frozen data.

Nothing here imports torch.

>>> cast = Cast.parse("e2m1 tile(32) pow2")
>>> cast == Cast(format="e2m1", granularity="tile(32)", scale="pow2")
True
>>> print(cast)
e2m1 tile(32) pow2 nearest
"""

from dither.errors import did_you_mean as did_you_mean
from dither.spec.cast import GROUP_SIZES as GROUP_SIZES
from dither.spec.cast import NAMED_CASTS as NAMED_CASTS
from dither.spec.cast import Cast as Cast
from dither.spec.cast import Granularity as Granularity
from dither.spec.cast import Rounding as Rounding
from dither.spec.cast import Scale as Scale
from dither.spec.cast import Transform as Transform
from dither.spec.layer import OPERANDS as OPERANDS
from dither.spec.layer import PRODUCTS as PRODUCTS
from dither.spec.layer import SAMPLINGS as SAMPLINGS
from dither.spec.layer import SWIGLU_CAST as SWIGLU_CAST
from dither.spec.layer import LayerPrecision as LayerPrecision
from dither.spec.layer import MemoryOptions as MemoryOptions
from dither.spec.layer import Outliers as Outliers
from dither.spec.layer import Override as Override
from dither.spec.patterns import matches as matches
from dither.spec.plan import COMPUTE as COMPUTE
from dither.spec.plan import PLAN_KEYS as PLAN_KEYS
from dither.spec.plan import PLAN_VERSION as PLAN_VERSION
from dither.spec.plan import Plan as Plan
from dither.spec.sampling import NOISES as NOISES
from dither.spec.sampling import PARTS as PARTS
from dither.spec.sampling import BitwidthLoss as BitwidthLoss
from dither.spec.sampling import Sampling as Sampling
from dither.spec.sampling import WeightDecay as WeightDecay
