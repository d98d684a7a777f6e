"""Folders of models: their files, written whole or not at all, and JSON."""

import json
import os
import re
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from dither.checkpoint.format import FileTensor, read_header
from dither.errors import UserError
from dither.files import Refused, from_json, is_free, read

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"


def write_json(path: Path, value: object) -> None:
    try:
        text = json.dumps(value, indent=2, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise UserError(f"{path.name} cannot be written as JSON: {error}.") from None
    path.write_text(text + "\n", encoding="utf-8")


def check_new(folder: Path) -> None:
    """Raise unless a folder is new or empty."""
    if not is_free(folder):
        raise UserError(f"A model is saved into a new or empty folder, and {str(folder)!r} is neither.")


class WeightsWriter:
    """Write tensors into model.safetensors, or into several files with an index.

    Args:
        place: The folder.
        most: Maximum bytes per file.
    """

    def __init__(self, place: Path, most: int) -> None:
        self.place, self.most = place, most
        self.shard: dict[str, Tensor] = {}
        self.names: list[list[str]] = []
        self.filled = self.total = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Add a tensor to the current file, or to the next one if that is full."""
        if self.shard and self.filled + tensor.nbytes > self.most:
            self._flush()
        self.shard[name] = tensor.detach().cpu().contiguous()
        self.filled += tensor.nbytes
        self.total += tensor.nbytes

    def _flush(self) -> None:
        self.names.append(list(self.shard))
        try:
            save_file(self.shard, self.place / f"part-{len(self.names)}", metadata={"format": "pt"})
        except SafetensorError as error:
            raise UserError(f"The weights cannot be written to {str(self.place)!r}: {error}.") from None
        self.shard, self.filled = {}, 0

    def finish(self) -> int:
        """Write the last file and the index, and return the number of bytes of all files."""
        self._flush()
        count = len(self.names)
        files = [WEIGHTS] if count == 1 else [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
        for number, file in enumerate(files, 1):
            os.rename(self.place / f"part-{number}", self.place / file)
        if count > 1:
            where = {name: file for file, names in zip(files, self.names, strict=True) for name in names}
            write_json(self.place / INDEX, {"metadata": {"total_size": self.total}, "weight_map": where})
        return sum((self.place / file).stat().st_size for file in files)


def read_json(path: Path) -> dict[str, Any]:
    """Read a file that holds one JSON object. Links are followed, since Hugging Face's cache consists of them."""
    if not path.is_file():
        raise UserError(f"{path} is not a file.")
    try:
        value = from_json(read(path, follow=True))
    except Refused as error:
        raise UserError(f"{path} is not JSON that can be read: {error}.") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} holds {short(value)}, and not a JSON object.")
    return value


def weight_map(folder: Path) -> dict[str, str]:
    """Return the file of each tensor, as an index has them."""
    if not (folder / INDEX).exists():
        if pickles := sorted(path.name for path in folder.iterdir() if path.suffix in (".bin", ".pt", ".pth")):
            raise UserError(
                f"{folder} has its weights in {pickles[0][:200]!r}, a pickle, which can execute code when it is read: save the "
                "model with safetensors."
            )
        raise UserError(f"{folder} has neither {WEIGHTS} nor {INDEX}.")
    where = read_json(folder / INDEX).get("weight_map")
    if not isinstance(where, dict) or not where:
        raise UserError(f"{folder / INDEX} has no 'weight_map', an object of tensors and their files.")
    for file in where.values():
        if not isinstance(file, str) or not re.fullmatch(r"[\w-][\w.-]{0,200}\.safetensors", file):
            raise UserError(
                f"{folder / INDEX} names a file {str(file)[:200]!r}, and files of weights are NAME.safetensors beside it."
            )
    return where


class Shards:
    """The tensors in the safetensors files of a folder. Each is read by itself, into memory of its own.

    Args:
        folder: A folder with model.safetensors, or with an index and the files that it names.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        where = None if (folder / WEIGHTS).exists() else weight_map(folder)
        self.tensors: dict[str, tuple[Path, FileTensor]] = {}
        """The file, dtype and shape of each tensor by name."""
        there = set()
        for name in [WEIGHTS] if where is None else sorted(set(where.values())):
            path = folder / name
            if not path.is_file():  # a device might never end
                raise UserError(f"{path} is not a file, and {INDEX if where else CONFIG} needs it: download the folder again.")
            try:
                header, _ = read_header(path)
            except Refused as error:
                raise UserError(f"{path} cannot be read: {str(error).removeprefix(f'{name}: ')}.") from None
            self.tensors |= {tensor: (path, entry) for tensor, entry in header.items()}
            there |= {(tensor, name) for tensor in header}
        if where is not None:
            for tensor, file in sorted(set(where.items()) - there):
                raise UserError(f"{folder / INDEX} says that {file} has the tensor {tensor[:200]!r}, but it does not.")
            for tensor, file in sorted(there - set(where.items())):
                raise UserError(f"{folder / file} has the tensor {tensor[:200]!r}, which {INDEX} does not list.")
        self.unread = set(self.tensors)
        """Names of tensors that nothing has asked for yet."""

    def entry(self, name: str) -> FileTensor | None:
        """Return the dtype and the shape of a tensor, or None if there is no such tensor."""
        return self.tensors[name][1] if name in self.tensors else None

    def read(self, name: str) -> Tensor:
        """Read a tensor."""
        path, entry = self.tensors[name]
        tensor = torch.empty(entry.shape, dtype=entry.dtype)
        if tensor.numel():
            memory = memoryview(tensor.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
            with path.open("rb", buffering=0) as file:
                file.seek(entry.begin)
                while memory:
                    if not (count := file.readinto(memory)):
                        raise UserError(f"{path} ends inside of the tensor {name[:200]!r}: download the folder again.")
                    memory = memory[count:]
        self.unread.discard(name)
        return tensor


def short(value: object) -> str:
    """Return a value from a file as JSON of at most 100 characters."""
    text = json.dumps(value)
    return text if len(text) <= 100 else f"{text[:100]}..."
