"""Evaluate language models: see docs/evaluation.md."""

from dither.evaluate.held_out import Perplexity as Perplexity
from dither.evaluate.held_out import perplexity as perplexity
