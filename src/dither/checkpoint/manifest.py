"""The manifest of a checkpoint: the size and SHA-256 of each of its files, and of itself.

Version 1 is a checkpoint in one part; version 2 is one that several ranks wrote, with an index file per rank.
"""

import hashlib
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dither import files as safe_files
from dither.files import Refused

MANIFEST, PLAIN = "manifest.json", "plain.json"
FORMAT, WHOLE, SHARDED = "dither checkpoint", 1, 2

FILES = {
    WHOLE: re.compile(r"tensors-[0-9]{5}\.safetensors"),
    SHARDED: re.compile(r"rank-[0-9]{5}(\.json|-[0-9]{5}\.safetensors)"),
}
"""The names of files besides plain.json, by version."""


@dataclass(frozen=True)
class Manifest:
    """A checked manifest."""

    step: int
    version: int
    files: dict[str, dict[str, Any]]
    """The `bytes` and `sha256` of each file."""


def to_bytes(step: int, files: Mapping[str, Mapping[str, int | str]], version: int = WHOLE) -> bytes:
    """Return a manifest as JSON that ends with its own SHA-256."""
    body = {"format": FORMAT, "version": version, "step": step, "files": files}
    own = hashlib.sha256(safe_files.to_json(body, "manifest")).hexdigest()
    return safe_files.to_json({**body, "sha256": own}, "manifest")


def read(path: Path) -> Manifest:
    """Return the manifest of a checkpoint; raise Refused unless the folder holds exactly the files that it names."""
    try:
        mode = path.lstat().st_mode
    except (OSError, ValueError):  # ValueError: a zero byte in the name
        raise Refused("there is no such folder") from None
    if not stat.S_ISDIR(mode):
        raise Refused("it is a link" if stat.S_ISLNK(mode) else "it is not a folder")
    present = {entry.name: entry for entry in os.scandir(path)}
    if MANIFEST not in present:
        raise Refused(f"it has no {MANIFEST}, so its save was not finished")
    for name, entry in present.items():
        if not entry.is_file(follow_symlinks=False):
            raise Refused(f"{name!r:.80} is {'a link' if entry.is_symlink() else 'not a regular file'}")
    manifest, data = safe_files.read_json(path / MANIFEST)
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise Refused(f"{MANIFEST} is not that of a Dither checkpoint")
    version = manifest.get("version")
    if type(version) is not int or version not in FILES:
        raise Refused(f"its version is {version!r:.40}, and this Dither reads versions {WHOLE} and {SHARDED}")
    step, entries = manifest.get("step"), manifest.get("files")
    if type(step) is not int or step < 0 or not isinstance(entries, dict):
        raise Refused(f"{MANIFEST} does not name a step and files")
    for name, entry in entries.items():
        if name != PLAIN and not FILES[version].fullmatch(name):
            raise Refused(f"{MANIFEST} names the file {name!r:.80}")
        right = isinstance(entry, dict) and set(entry) == {"bytes", "sha256"}
        if not right or type(entry["bytes"]) is not int or not isinstance(entry["sha256"], str):
            raise Refused(f"{MANIFEST} does not give the bytes and sha256 of {name}")
    if PLAIN not in entries:
        raise Refused(f"{MANIFEST} does not name {PLAIN}")
    if data != to_bytes(step, entries, version):  # its own hash, and every byte
        raise Refused(f"{MANIFEST} was changed: it is not what its own SHA-256 says")
    if extra := sorted(set(present) - set(entries) - {MANIFEST}):
        raise Refused(f"{extra[0]!r:.80} is not in its manifest")
    if missing := sorted(set(entries) - set(present)):
        raise Refused(f"{missing[0]} is missing")
    return Manifest(step, version, entries)


def read_plain(path: Path, manifest: Manifest) -> dict[str, Any]:
    """Return the plain values of a checkpoint, after comparing their hash with the manifest's."""
    entry = manifest.files[PLAIN]
    data = safe_files.read(path / PLAIN)
    if len(data) != entry["bytes"]:
        raise Refused(f"{PLAIN}: it has {len(data)} bytes where the manifest says {entry['bytes']}")
    if hashlib.sha256(data).hexdigest() != entry["sha256"]:
        raise Refused(f"{PLAIN}: its SHA-256 is not the manifest's: a bit changed since it was saved")
    try:
        plain = safe_files.from_json(data)
    except Refused as error:
        raise Refused(f"{PLAIN} cannot be read: {error}") from None
    if not isinstance(plain, dict):
        raise Refused(f"{PLAIN} is not an object")
    return plain
