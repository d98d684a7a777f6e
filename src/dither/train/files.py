"""The names of the files and folders within the folder of a run."""

CONFIG, PLAN, CONVERSION, ENVIRONMENT = "config.toml", "plan.json", "conversion.json", "environment.json"
CHECKPOINTS = "checkpoints"
TOKENS = "tokens"
"""The tokens that a run prepared."""
