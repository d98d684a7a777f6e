"""Conversations and instructions in JSON lines, as tokens of which some count towards the loss.

A line has one of these forms:

    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}, ...]}
    {"prompt": "...", "completion": "..."}                    or lists of messages in place of the texts
    {"instruction": "...", "input": "...", "output": "..."}   as in Alpaca; input may be missing or empty

What the model is to learn counts: replies of the assistant, completions and outputs, with the token that ends them. Prompts do
not count. Messages are written by the chat template of the tokenizer, or by `SIMPLE` if it has none; a prompt and its
completion that are texts follow each other as they are.
"""

import functools
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tokenizers
from numpy.typing import NDArray

from dither.data.text import Skip, first_line
from dither.data.tokenizer import TOKENIZER, Array, Tokenizer
from dither.errors import UserError
from dither.files import Refused, limited, read

FILES = ("tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json", "added_tokens.json")
"""Files beside a tokenizer.json that a chat template depends on."""

SIMPLE = {"system": "### System:\n{}\n\n", "user": "### User:\n{}\n\n", "assistant": "### Assistant:\n"}
"""The template for tokenizers without one. A reply follows its heading, and the end token follows the reply."""

REPLY = "assistant"

LONGEST, CHATS = 1 << 16, 1000
"""Characters that a template may write besides 16 per character of the messages, and conversations rendered at a time."""

Message = Mapping[str, Any]


class Part(NamedTuple):
    """A piece of a conversation, which is tokenized by itself, so that a prompt has the same tokens with and without reply."""

    text: str
    counts: bool
    ends: bool = False
    """True if the end token follows."""


class EncodedChat(NamedTuple):
    """The tokens of a conversation, including the last end token."""

    tokens: Array
    counted: NDArray[np.uint8]
    """1 for tokens that count towards the loss, else 0: uint8[number of tokens]."""
    size: int
    """Bytes of the text."""


@dataclass(frozen=True)
class Conversation:
    """A line of JSON: messages, or a prompt and a completion."""

    messages: tuple[Message, ...]
    """The messages; () if there are plain texts instead."""
    prompt: str
    completion: str
    first_counted: int
    """Number of the first message that may count: those before it are the prompt."""
    where: str
    """The line and the file."""

    @property
    def text(self) -> str:
        """The text that decides whether the conversation is held out."""
        plain = [self.prompt, self.completion] if not self.messages else [dict(message) for message in self.messages]
        return json.dumps(plain, sort_keys=True, ensure_ascii=False)


def read_conversation(row: object, where: str) -> Conversation:
    """Return the conversation of a line; raise a UserError that names the line if it is not one.

    >>> row = {"instruction": "Translate to French.", "input": "cat", "output": "chat"}
    >>> [message["content"] for message in read_conversation(row, "line 1 of 'a.jsonl'").messages]
    ['Translate to French.\\n\\ncat', 'chat']
    >>> read_conversation({"messages": [{"role": "user", "content": "Hi"}]}, "line 2 of 'a.jsonl'")
    Traceback (most recent call last):
    dither.errors.UserError: No reply of the assistant is in line 2 of 'a.jsonl', so nothing counts towards the loss.
    """
    if not isinstance(row, dict):
        raise UserError(f"There is a {type(row).__name__} in {where}, not an object.")
    if "messages" in row:
        messages = _messages(row["messages"], "messages", where)
        first = 0
    elif "prompt" in row and "completion" in row:
        if isinstance(row["prompt"], str) and isinstance(row["completion"], str):
            if not row["completion"]:
                raise UserError(f"The completion in {where} is empty, so nothing counts towards the loss.")
            _check_encodable((row["prompt"], row["completion"]), where)
            return Conversation((), row["prompt"], row["completion"], 0, where)
        begin = _messages(row["prompt"], "prompt", where)
        messages, first = begin + _messages(row["completion"], "completion", where), len(begin)
    elif "instruction" in row and "output" in row:
        texts = [row["instruction"], row.get("input") or "", row["output"]]
        for name, text in zip(("instruction", "input", "output"), texts, strict=True):
            if not isinstance(text, str):
                raise UserError(f"The field {name!r} in {where} is {type(text).__name__}, not a string.")
        asked = "\n\n".join(text for text in texts[:2] if text)
        messages, first = _messages([_message("user", asked), _message(REPLY, texts[2])], "messages", where), 0
    else:
        raise UserError(
            f"{_capital(where)} has {', '.join(map(repr, row)) or 'no fields'}: a conversation has 'messages', 'prompt' and "
            "'completion', or 'instruction' and 'output'."
        )
    if not any(message["role"] == REPLY for message in messages[first:]):
        raise UserError(f"No reply of the assistant is in {where}, so nothing counts towards the loss.")
    return Conversation(messages, "", "", first, where)


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _messages(value: object, name: str, where: str) -> tuple[Message, ...]:
    if not isinstance(value, list) or not value:
        raise UserError(f"The field {name!r} in {where} is not a list of messages.")
    for number, message in enumerate(value, 1):
        known = isinstance(message, dict) and isinstance(message.get("role"), str)
        if not known or not isinstance(message.get("content"), str):
            raise UserError(f"Message {number} of {name!r} in {where} is not an object with the texts 'role' and 'content'.")
        if message["role"] == REPLY and not message["content"]:
            raise UserError(f"Message {number} of {name!r} in {where} is an empty reply.")
    _check_encodable([text for message in value for text in (message["role"], message["content"])], where)
    return tuple(value)


def _check_encodable(texts: Sequence[str], where: str) -> None:
    try:
        "".join(texts).encode()
    except UnicodeEncodeError:
        raise UserError(f"{_capital(where)} has half of a surrogate pair, which is no text.") from None


def _capital(where: str) -> str:
    return where[:1].upper() + where[1:]


# Templates ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ChatTemplate:
    """A tokenizer with the way in which it writes conversations. `load_template` makes one."""

    tokenizer: Tokenizer
    folder: Path | None = None
    """The folder of a tokenizer that has a chat template; None means `SIMPLE`."""
    files: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    """The files that the template depends on."""
    _renderer: Any = field(default=None, repr=False, compare=False)
    _engine: Any = field(default=None, repr=False, compare=False)
    """The tokenizer that reads special tokens in rendered text as such."""

    @property
    def name(self) -> str:
        """The name of the template in manifests."""
        return "simple" if self._renderer is None else "tokenizer"

    def parts(self, chat: Conversation) -> list[Part]:
        """Return the pieces of a conversation, in order.

        >>> from dither.data import BYTES
        >>> chat = read_conversation({"instruction": "Say hello.", "output": "Hello!"}, "line 1")
        >>> for part in ChatTemplate(BYTES).parts(chat):
        ...     print(part)
        Part(text='### User:\\nSay hello.\\n\\n### Assistant:\\n', counts=False, ends=False)
        Part(text='Hello!', counts=True, ends=True)
        """
        if not chat.messages:
            return [Part(chat.prompt, False), Part(chat.completion, True, ends=True)]
        return self._simple(chat) if self._renderer is None else self._rendered(chat)

    def parts_of_all(self, chats: Sequence[Conversation]) -> list[list[Part]]:
        """Return the pieces of each conversation. The template of a tokenizer is rendered in a process with limits."""
        if self._renderer is None:
            return [self.parts(chat) for chat in chats]
        found: list[list[Part]] = []
        for first in range(0, len(chats), CHATS):
            some = chats[first : first + CHATS]
            messages = sum(len(chat.messages) for chat in some)
            try:
                rows = limited(functools.partial(list, map(self.parts, some)), "it", seconds=4 + messages // 1000)
            except Refused as error:
                first_of_them = f"for {some[0].where}" + " or one that follows" * (len(some) > 1)
                raise UserError(f"The chat template in {str(self.folder)!r} is refused: {error} {first_of_them}.") from None
            found += [[Part(*part) for part in row] for row in rows]
        return found

    def _simple(self, chat: Conversation) -> list[Part]:
        parts: list[Part] = []
        asked = ""
        for number, message in enumerate(chat.messages):
            role, content = message["role"], message["content"]
            if role not in SIMPLE:
                raise UserError(
                    f"{_capital(chat.where)} has the role {role!r:.40}; without a chat template, roles are {', '.join(SIMPLE)}."
                )
            if role == REPLY:
                parts += [Part(asked + SIMPLE[role], False), Part(content, number >= chat.first_counted, ends=True)]
                asked = ""
            else:
                asked += SIMPLE[role].format(content)
        return [*parts, Part(asked, False)] if asked else parts

    def _rendered(self, chat: Conversation) -> list[Part]:
        """Return what the template of the tokenizer writes, cut where replies begin and end."""
        whole = self._render(chat, chat.messages, prompt=False)
        if len(whole) > LONGEST + 16 * sum(len(message["content"]) for message in chat.messages):
            raise UserError(f"The chat template in {str(self.folder)!r} writes {len(whole):,} characters for {chat.where}.")
        parts: list[Part] = []
        done = 0
        for number, message in enumerate(chat.messages):
            if message["role"] != REPLY or number < chat.first_counted:
                continue
            begin = self._render(chat, chat.messages[:number], prompt=True)
            end = whole if number + 1 == len(chat.messages) else self._render(chat, chat.messages[: number + 1], prompt=False)
            if not (whole.startswith(begin) and whole.startswith(end) and done <= len(begin) < len(end)):
                raise UserError(
                    f"The chat template in {str(self.folder)!r} writes message {number + 1} of {chat.where} otherwise when "
                    "other messages follow, so it is unclear which tokens are the reply: split such conversations, or use "
                    "a template that only appends."
                )
            parts += [Part(whole[done : len(begin)], False), Part(whole[len(begin) : len(end)], True)]
            done = len(end)
        return [*parts, Part(whole[done:], False)] if done < len(whole) else parts

    def _render(self, chat: Conversation, messages: Sequence[Message], *, prompt: bool) -> str:
        try:
            text = self._renderer.apply_chat_template(
                [dict(message) for message in messages], tokenize=False, add_generation_prompt=prompt
            )
        except Exception as error:  # a template may raise anything
            raise UserError(
                f"The chat template in {str(self.folder)!r} cannot write {chat.where}: {first_line(error)}."
            ) from None
        return str(text)

    def encode_all(self, chats: Sequence[Conversation], skip: Skip) -> list[EncodedChat]:
        """Return the tokens of conversations, without those whose messages spell a special token.

        >>> from dither.data import BYTES
        >>> chat = read_conversation({"prompt": "1+1=", "completion": "2"}, "line 1")
        >>> found, = ChatTemplate(BYTES).encode_all([chat], lambda where, why: None)
        >>> found.tokens.tolist(), found.counted.tolist()
        ([49, 43, 49, 61, 50, 256], [0, 0, 0, 0, 1, 1])
        """
        plain = [chat for chat in chats if not self._spells_special(chat, skip)]
        kept = list(zip(plain, self.parts_of_all(plain), strict=True))
        rendered = [bool(chat.messages) and self._renderer is not None for chat, _ in kept]
        texts: dict[bool, list[str]] = {False: [], True: []}
        for special, (_, parts) in zip(rendered, kept, strict=True):
            texts[special] += [part.text for part in parts]
        tokens = {False: iter(self.tokenizer.encode_all(texts[False])), True: iter(self._encode_special(texts[True]))}
        found = []
        for special, (chat, parts) in zip(rendered, kept, strict=True):
            pieces = [(part, next(tokens[special])) for part in parts]
            if not special and any((ids == self.tokenizer.end).any() for _, ids in pieces):
                skip(chat.where, "spelling the end token")
                continue
            found.append(self._joined(pieces))
        return found

    def _joined(self, pieces: list[tuple[Part, Array]]) -> EncodedChat:
        end = np.array([self.tokenizer.end], self.tokenizer.dtype)
        tokens: list[Array] = []
        counted: list[NDArray[np.uint8]] = []
        for part, ids in pieces:
            whole = np.concatenate((ids, end)) if part.ends else ids
            tokens.append(whole)
            counted.append(np.full(len(whole), part.counts, np.uint8))
        if not len(tokens[-1]) or tokens[-1][-1] != self.tokenizer.end:  # the document ends, and the template has not said so
            tokens.append(end)
            counted.append(np.zeros(1, np.uint8))
        size = sum(len(part.text.encode()) for part, _ in pieces)
        return EncodedChat(np.concatenate(tokens), np.concatenate(counted), size)

    def _spells_special(self, chat: Conversation, skip: Skip) -> bool:
        """Return whether a message has the spelling of a special token, which would act as one in rendered text."""
        if self._renderer is None or not chat.messages:
            return False
        special = [added.content for added in self._engine.get_added_tokens_decoder().values() if added.special]
        found = any(name in message["content"] for message in chat.messages for name in special)
        if found:
            skip(chat.where, "spelling a special token")
        return found

    def _encode_special(self, texts: list[str]) -> list[Array]:
        if not texts:
            return []
        return [np.array(each.ids, self.tokenizer.dtype) for each in self._engine.encode_batch(texts, add_special_tokens=False)]


def load_template(tokenizer: Tokenizer, source: str | Path = "bytes") -> ChatTemplate:
    """Return the chat template beside a tokenizer.json, or `SIMPLE` if there is none.

    The template is rendered by transformers in the sandbox of jinja2: it is data, and no code of the folder is run.

    Args:
        tokenizer: The tokenizer.
        source: Where it came from: "bytes", the path of a tokenizer.json, or its folder.

    >>> from dither.data import BYTES
    >>> load_template(BYTES).name
    'simple'
    """
    path = Path(source)
    folder = path if path.is_dir() else path.parent
    if tokenizer.json is None or not os.path.isfile(folder / TOKENIZER):
        return ChatTemplate(tokenizer)
    renderer = open_renderer(folder)
    if renderer is None:
        return ChatTemplate(tokenizer)
    files = {name: (folder / name).read_bytes() for name in FILES if os.path.isfile(folder / name)}
    engine = tokenizers.Tokenizer.from_str(tokenizer.json)
    engine.no_truncation()
    engine.no_padding()
    return ChatTemplate(tokenizer, folder, files, renderer, engine)


def open_renderer(folder: Path) -> Any:
    """Return the tokenizer of transformers for a folder with a chat template; None if it has none."""
    settings = folder / "tokenizer_config.json"
    try:
        config = json.loads(read(settings, follow=True)) if os.path.isfile(settings) else {}
    except (ValueError, RecursionError, Refused) as error:
        raise UserError(f"{str(settings)!r} is not JSON: {first_line(error)}.") from None
    if not os.path.isfile(folder / "chat_template.jinja") and not (isinstance(config, dict) and config.get("chat_template")):
        return None
    try:
        import transformers
    except ImportError:
        raise UserError(
            f"The chat template in {str(folder)!r} needs transformers, which is not installed: pip install 'dither[hf]'."
        ) from None
    try:
        return transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # errors of many libraries for a bad file
        raise UserError(f"transformers cannot read the tokenizer in {str(folder)!r}: {first_line(error)}.") from None


def file_hashes(template: ChatTemplate) -> dict[str, str]:
    """Return the SHA-256 of the files that a template depends on."""
    return {name: hashlib.sha256(data).hexdigest() for name, data in template.files.items()}
