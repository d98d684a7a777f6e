"""The names of the files and folders within the folder of a run."""

CONFIG, PLAN, CONVERSION, ENVIRONMENT = "config.toml", "plan.json", "conversion.json", "environment.json"
PLANS = "plans.json"
"""The plans of a run that cannot be made again from its config alone: those of files, and of fp8-auto."""
CHECKPOINTS = "checkpoints"
TOKENS = "tokens"
"""The tokens that a run prepared."""
