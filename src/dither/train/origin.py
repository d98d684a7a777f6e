"""The origin of a run's initial weights, with their SHA-256, and the tokenizer that comes with them."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from dither import files
from dither.checkpoint import step_of
from dither.checkpoint.format import MANIFEST
from dither.data.chat import FILES
from dither.data.tokenizer import TOKENIZER
from dither.errors import UserError
from dither.train.config import Model
from dither.train.files import CHANGES, ORIGIN
from dither.train.weights import checkpoint_of

MODEL = "config.json"


def origin_of(model: Model) -> dict[str, Any] | None:
    """Return the origin of a model's initial weights as plain values, or None if they are random.

    Files are read and hashed: about a second per gigabyte.

    >>> origin_of(Model(preset="tiny")) is None
    True
    """
    if model.weights is not None:
        path, _ = checkpoint_of(model.weights)
        try:
            manifest, _ = files.read_json(path / MANIFEST)
        except files.Refused as error:
            raise UserError(f"The checkpoint {str(path)!r} is refused: {error}.") from None
        digest = str(manifest.get("sha256", "")) if isinstance(manifest, dict) else ""
        return {"kind": "checkpoint", "path": str(path.absolute()), "step": step_of(path), "sha256": digest}
    if model.hf is None or model.hf.endswith(".json"):
        return None
    folder = Path(model.hf)
    if not os.path.isfile(folder / MODEL):
        return {"kind": "hub", "path": model.hf, "sha256": None}
    return {"kind": "folder", "path": str(folder.absolute()), "sha256": folder_digest(folder)}


def folder_digest(folder: Path) -> str:
    """Return the SHA-256 of the config and the weights of a Hugging Face folder: of the names and digests of its files."""
    whole = hashlib.sha256()
    for path in sorted([folder / MODEL, *folder.glob("*.safetensors")]):
        with path.open("rb") as file:
            whole.update(f"{path.name}\0{hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return whole.hexdigest()


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


def check_same(saved: dict[str, Any] | None, now: dict[str, Any] | None, path: Path) -> None:
    """Raise a UserError unless the base of adapters is the one that they were trained on."""
    then, here = (None if origin is None else origin.get("sha256") for origin in (saved, now))
    if then != here:
        where = "" if now is None else f" in {now['path']!r}"
        raise UserError(
            f"The adapters in {str(path)!r} were trained on another base than the one{where}: its SHA-256 has changed. Put the "
            "original weights back."
        )
