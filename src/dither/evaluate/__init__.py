"""Evaluate language models: see docs/evaluation.md."""

from dither.evaluate.held_out import Perplexity as Perplexity
from dither.evaluate.held_out import TaskScore as TaskScore
from dither.evaluate.held_out import perplexity as perplexity
from dither.evaluate.likelihood import Likelihood as Likelihood
from dither.evaluate.likelihood import log_likelihoods as log_likelihoods
