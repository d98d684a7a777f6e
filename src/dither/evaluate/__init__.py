"""How good a model is: see docs/evaluation.md."""

from dither.evaluate.perplexity import Perplexity as Perplexity
from dither.evaluate.perplexity import perplexity as perplexity
