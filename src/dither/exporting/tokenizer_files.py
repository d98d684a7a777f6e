"""The tokenizer of an exported model, as transformers and GGUF read it."""

import json
import os
import shutil
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import tokenizers

from dither.data import Tokenizer, load_tokenizer
from dither.data.text import SEPARATOR
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


def size_of(tokenizer: AnyTokenizer) -> int:
    """Return the number of tokens of a tokenizer."""
    if isinstance(tokenizer, Tokenizer):
        return tokenizer.vocab_size
    if isinstance(tokenizer, str | os.PathLike):
        return _engine_size(_text_of(Path(tokenizer)))
    return len(tokenizer)


def json_of(tokenizer: AnyTokenizer) -> str:
    """Return the tokenizer.json of any tokenizer."""
    if isinstance(tokenizer, Tokenizer):
        return tokenizer_json(tokenizer)
    if isinstance(tokenizer, str | os.PathLike):
        return _text_of(Path(tokenizer))
    engine = getattr(tokenizer, "backend_tokenizer", None)
    if engine is None:
        raise UserError(f"{type(tokenizer).__name__} has no tokenizer.json: give a fast tokenizer (--tokenizer).")
    return str(engine.to_str())


def end_of(tokenizer: AnyTokenizer) -> int | None:
    """Return the token that ends a text, or None if it is not known."""
    if isinstance(tokenizer, Tokenizer):
        return tokenizer.end
    if isinstance(tokenizer, str | os.PathLike):
        source = Path(tokenizer)
        return load_tokenizer(source).end if source.is_file() else _end_in(source, _text_of(source))
    return tokenizer.eos_token_id


def check_fit(tokenizer: AnyTokenizer, vocab_size: int) -> None:
    """Raise unless a model has a row of its embedding for every token."""
    if (size := size_of(tokenizer)) > vocab_size:
        raise UserError(
            f"The tokenizer has {size:,} tokens, and the embedding of the model has {vocab_size:,} rows: "
            "name the tokenizer that the model was trained with (--tokenizer)."
        )


def write_tokenizer(tokenizer: AnyTokenizer, place: Path, longest: int | None) -> int | None:
    """Write the files of a tokenizer into a folder, and return the token that ends a text, if it is known.

    Args:
        tokenizer: The tokenizer.
        place: The folder.
        longest: The number of positions of the model, if it has a limit.
    """
    if isinstance(tokenizer, str | os.PathLike):
        source = Path(tokenizer)
        if source.is_file():
            return write_tokenizer(load_tokenizer(source), place, longest)
        text = _text_of(source)
        for name in FILES:
            if (source / name).is_file():
                shutil.copyfile(source / name, place / name)
        return _end_in(source, text)
    if not isinstance(tokenizer, Tokenizer):
        tokenizer.save_pretrained(str(place))
        return tokenizer.eos_token_id
    text = tokenizer_json(tokenizer)
    end = tokenizers.Tokenizer.from_str(text).id_to_token(tokenizer.end)
    (place / "tokenizer.json").write_text(text, encoding="utf-8")
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end}
    config |= {"clean_up_tokenization_spaces": False} | ({"model_max_length": longest} if longest else {})
    (place / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return tokenizer.end


def _text_of(source: Path) -> str:
    path = source / "tokenizer.json" if source.is_dir() else source
    if not path.is_file():
        raise UserError(
            f"There is no tokenizer {str(source)!r}: name a tokenizer.json, or a folder that has one (--tokenizer)."
        )
    return path.read_text(encoding="utf-8")


def _engine_size(text: str) -> int:
    try:
        vocab = tokenizers.Tokenizer.from_str(text).get_vocab(with_added_tokens=True)
    except Exception as error:  # the package raises its own kind
        raise UserError(f"The tokenizer cannot be read: {str(error).splitlines()[0]} (--tokenizer names another).") from None
    return int(max(vocab.values())) + 1


def _end_in(source: Path, text: str) -> int | None:
    """Return the end token that tokenizer_config.json names."""
    path = source / "tokenizer_config.json"
    name = json.loads(path.read_text(encoding="utf-8")).get("eos_token") if path.is_file() else None
    name = name.get("content") if isinstance(name, dict) else name
    found = tokenizers.Tokenizer.from_str(text).token_to_id(name) if isinstance(name, str) else None
    return found if found is None else int(found)
