"""Experiments with whole runs: comparisons, evaluation of saved models, inspection, and two precisions in lockstep."""
