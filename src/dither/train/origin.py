"""The origin of a run's initial weights, with their SHA-256, and the tokenizer that comes with them."""

import json
import os
from pathlib import Path

from dither import files
from dither.data.chat import FILES
from dither.data.tokenizer import TOKENIZER
from dither.errors import UserError
from dither.train.files import CHANGES, ORIGIN


def keep_tokenizer(source: str, folder: Path) -> None:
    """Copy the files of a tokenizer into a run, so that exports have its chat template and special tokens.

    Args:
        source: "bytes", or the path of a tokenizer.json. Without other files beside it, nothing is copied.
        folder: The folder to write, which may exist.
    """
    path = Path(source)
    place = path if path.is_dir() else path.parent
    if source == "bytes" or not any(os.path.isfile(place / name) for name in FILES):
        return
    try:
        folder.mkdir(exist_ok=True)
        for name in (TOKENIZER, *FILES):
            if os.path.isfile(place / name):
                files.replace(folder / name, (place / name).read_bytes())
    except OSError as error:
        why = files.reason(error, folder)
        raise UserError(f"The tokenizer cannot be copied from {str(place)!r} to {str(folder)!r}: {why}.") from None


def recorded_facts(folder: Path) -> dict[str, str]:
    """Return the origin of the weights and the changes on resume that a run folder records, as text for reports."""
    facts: dict[str, str] = {}
    try:
        if os.path.lexists(folder / ORIGIN):
            origin, _ = files.read_json(folder / ORIGIN)
            if isinstance(origin, dict):
                facts["initial_weights"] = f"{origin.get('path')}, SHA-256 {origin.get('sha256')}"
        if os.path.lexists(folder / CHANGES):
            facts["changes_on_resume"] = "; ".join(map(_change, files.read(folder / CHANGES).decode().splitlines()))
    except (files.Refused, ValueError, KeyError, TypeError) as error:
        raise UserError(f"The record of the run in {str(folder)!r} cannot be read: {error}.") from None
    return facts


def _change(line: str) -> str:
    """Return a line of the record of changes in words.

    >>> _change('{"step": 2, "time": 0, "changes": {"optim.lr": ["0.003", "1e-05"]}}')
    'from step 2 on optim.lr 1e-05 (before 0.003)'
    """
    change = json.loads(line)
    fields = ", ".join(f"{name} {new} (before {old})" for name, (old, new) in change["changes"].items())
    return f"from step {change['step']} on {fields}"
