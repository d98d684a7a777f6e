"""Evaluate language models: see docs/evaluation.md."""

from typing import TYPE_CHECKING

from dither.lazy import lazily

if TYPE_CHECKING:
    from dither.evaluate.deployment import Deployment as Deployment
    from dither.evaluate.deployment import deploy as deploy
    from dither.evaluate.deployment import plan_from_bitwidths as plan_from_bitwidths
    from dither.evaluate.held_out import Likelihood as Likelihood
    from dither.evaluate.held_out import Perplexity as Perplexity
    from dither.evaluate.held_out import TaskScore as TaskScore
    from dither.evaluate.held_out import log_likelihoods as log_likelihoods
    from dither.evaluate.held_out import perplexity as perplexity

__getattr__ = lazily(
    __name__,
    {
        "deployment": "Deployment deploy plan_from_bitwidths",
        "held_out": "Likelihood Perplexity TaskScore log_likelihoods perplexity",
    },
)
