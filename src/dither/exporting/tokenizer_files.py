"""The tokenizer of an exported model, as transformers and GGUF read it."""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import tokenizers

from dither.data import Tokenizer, load_tokenizer
from dither.data.text import SEPARATOR, first_line
from dither.errors import UserError

FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja"),
    *("vocab.json", "merges.txt", "tokenizer.model"),
)
"""Files of a tokenizer in a Hugging Face folder."""


@runtime_checkable
class TransformersTokenizer(Protocol):
    """A tokenizer of transformers."""

    eos_token_id: int | None

    def __len__(self) -> int:
        """Return the number of tokens."""

    def save_pretrained(self, folder: str) -> object:
        """Write its files into a folder."""


AnyTokenizer = Tokenizer | TransformersTokenizer | str | os.PathLike[str]
"""A tokenizer of `dither.data`, one of transformers, or a folder or tokenizer.json."""


@dataclass(frozen=True)
class TokenizerFiles:
    """The files of a tokenizer, and what they say."""

    json: str | None
    """The text of tokenizer.json; None for a tokenizer of transformers that has none."""
    size: int
    """Number of tokens."""
    end: int | None
    """The token that ends a text, or None if it is not known."""
    write: Callable[[Path, int | None], object]
    """Write the files into a folder; the second argument is the number of positions of the model, if it has a limit."""

    @staticmethod
    def of(tokenizer: AnyTokenizer) -> "TokenizerFiles":
        """Return the files of any tokenizer."""
        if isinstance(tokenizer, str | os.PathLike):
            source = Path(tokenizer)
            if not (source / "tokenizer.json" if source.is_dir() else source).is_file():
                raise UserError(
                    f"There is no tokenizer {str(source)!r}: name a tokenizer.json, or a folder that has one (--tokenizer)."
                )
            return _of_folder(source) if source.is_dir() else TokenizerFiles.of(load_tokenizer(source))
        if isinstance(tokenizer, Tokenizer):
            own = tokenizer_json(tokenizer)
            return TokenizerFiles(own, tokenizer.vocab_size, tokenizer.end, partial(_write, own, tokenizer.end))
        engine, save = getattr(tokenizer, "backend_tokenizer", None), tokenizer.save_pretrained
        text = None if engine is None else str(engine.to_str())
        return TokenizerFiles(text, len(tokenizer), tokenizer.eos_token_id, lambda place, _: save(str(place)))

    def check_fit(self, vocab_size: int) -> None:
        """Raise unless a model has a row of its embedding for every token."""
        if self.size > vocab_size:
            raise UserError(
                f"The tokenizer has {self.size:,} tokens, and the embedding of the model has {vocab_size:,} rows: "
                "name the tokenizer that the model was trained with (--tokenizer)."
            )


def _of_folder(source: Path) -> TokenizerFiles:
    """Return the files of a Hugging Face folder, which are copied as they are."""
    text, config = (source / "tokenizer.json").read_text(encoding="utf-8"), source / "tokenizer_config.json"
    try:
        engine = tokenizers.Tokenizer.from_str(text)
        size = max(engine.get_vocab(with_added_tokens=True).values()) + 1
    except Exception as error:  # the package raises its own kind
        raise UserError(f"The tokenizer cannot be read: {first_line(error)} (--tokenizer names another).") from None
    name = json.loads(config.read_text(encoding="utf-8")).get("eos_token") if config.is_file() else None
    name = name.get("content") if isinstance(name, dict) else name
    end = engine.token_to_id(name) if isinstance(name, str) else None

    def copy(place: Path, _: int | None) -> None:
        for file in FILES:
            if (source / file).is_file():
                shutil.copyfile(source / file, place / file)

    return TokenizerFiles(text, size, end, copy)


def _write(text: str, end: int, place: Path, longest: int | None) -> None:
    (place / "tokenizer.json").write_text(text, encoding="utf-8")
    name = tokenizers.Tokenizer.from_str(text).id_to_token(end)
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": name}
    config |= {"clean_up_tokenization_spaces": False} | ({"model_max_length": longest} if longest else {})
    (place / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def tokenizer_json(tokenizer: Tokenizer) -> str:
    """Return the tokenizer.json of a tokenizer; bytes become a byte-level BPE without merges that gives the same tokens.

    >>> from dither.data import BYTES
    >>> engine = tokenizers.Tokenizer.from_str(tokenizer_json(BYTES))
    >>> engine.encode("Hé").ids, engine.decode([72, 195, 169, 256])
    ([72, 195, 169], 'Hé')
    """
    if tokenizer.json is not None:
        return tokenizer.json
    engine = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={character: byte for byte, character in _letters()}, merges=[]))
    engine.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    engine.decoder = tokenizers.decoders.ByteLevel()
    engine.add_special_tokens([tokenizers.AddedToken(SEPARATOR, special=True, normalized=False)])
    return engine.to_str()


def _letters() -> list[tuple[int, str]]:
    """Return the character that GPT-2's tokenizer writes for each byte: itself if it is printable, else one from 256 on."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in printable]
    return [(byte, chr(byte if byte in printable else 256 + others.index(byte))) for byte in range(256)]
