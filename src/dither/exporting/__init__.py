"""Export of trained models: Hugging Face folders in many formats, and GGUF."""

from dither.exporting.folder import export as export
from dither.exporting.formats import FORMATS as FORMATS
from dither.exporting.formats import NAMES as NAMES
from dither.exporting.record import Export as Export
from dither.exporting.record import ExportedLayer as ExportedLayer
from dither.exporting.record import LogitCheck as LogitCheck
from dither.exporting.rollout import RolloutWeight as RolloutWeight
from dither.exporting.rollout import rollout_weights as rollout_weights
