"""Text, tokens and batches, in an order that only the seed and the step determine: see docs/data.md."""

from typing import TYPE_CHECKING

from dither.lazy import lazily

if TYPE_CHECKING:
    from dither.data.chat import ChatTemplate as ChatTemplate
    from dither.data.chat import load_template as load_template
    from dither.data.corpus import open_corpus as open_corpus
    from dither.data.loader import Batch as Batch
    from dither.data.loader import Loader as Loader
    from dither.data.loader import Prefetch as Prefetch
    from dither.data.loader import held_out as held_out
    from dither.data.preparation import is_held_out as is_held_out
    from dither.data.preparation import prepare as prepare
    from dither.data.text import Document as Document
    from dither.data.text import documents as documents
    from dither.data.tokenizer import BYTES as BYTES
    from dither.data.tokenizer import Tokenizer as Tokenizer
    from dither.data.tokenizer import load_tokenizer as load_tokenizer
    from dither.data.tokenizer import train_bpe as train_bpe
    from dither.data.tokens import Corpus as Corpus
    from dither.data.tokens import Counts as Counts
    from dither.data.tokens import Tokens as Tokens
    from dither.data.tokens import is_prepared as is_prepared
    from dither.data.tokens import open_tokens as open_tokens
    from dither.data.tokens import prepared_folder as prepared_folder

__getattr__ = lazily(
    __name__,
    {
        "chat": "ChatTemplate load_template",
        "corpus": "open_corpus",
        "loader": "Batch Loader Prefetch held_out",
        "preparation": "is_held_out prepare",
        "text": "Document documents",
        "tokenizer": "BYTES Tokenizer load_tokenizer train_bpe",
        "tokens": "Corpus Counts Tokens is_prepared open_tokens prepared_folder",
    },
)
