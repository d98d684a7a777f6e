"""Check SNIP's goal and the layout of a config against the model, before the text is read and the model is built."""

from dither.data import is_prepared, load_tokenizer
from dither.errors import UserError
from dither.models import CausalLM, preset
from dither.models.presets import skeleton
from dither.nn import convert
from dither.parallel import Layout
from dither.snip.options import options
from dither.snip.planning import check_goal
from dither.train.config import Config, Parallel
from dither.train.layout import check_mode, check_stages


def check_snip(config: Config) -> None:
    """Raise a UserError if no plan can reach the goal of `[snip]`. Models of Hugging Face are checked when they are built.

    >>> from dither.snip import SnipSettings
    >>> check_snip(Config(snip=SnipSettings(target=0.5, pinned=("*.down=fp8",))))
    Traceback (most recent call last):
    dither.errors.UserError: In [snip]: The pinned '*.down' matches no layer: there is model.layers.0.self_attn.q_proj, ...
    """
    if config.snip.target is None or config.model.size is None:
        return
    model = _skeleton(config)
    try:
        check_goal(model, options(config.snip.options), config.snip)
    except UserError as error:
        raise UserError(f"In [snip]: {error}") from None


def check_layout(config: Config, world: int) -> None:
    """Raise a UserError if `[parallel]` does not fit the ranks, the mode or the model. Hugging Face's are checked when built.

    >>> from dither.train.config import Parallel
    >>> check_layout(Config(parallel=Parallel(tp=3)), 3)
    Traceback (most recent call last):
    dither.errors.UserError: In [parallel]: 4 attention heads cannot be divided by tp=3.
    """
    parallel = config.parallel
    sizes = parallel.sizes(world)
    if not parallel.cuts:
        return
    check_mode(config)
    if config.lora.rank is not None:
        raise UserError(
            f"lora.rank={config.lora.rank} holds the base as codes, which [parallel] does not shard: use dp_replicate alone."
        )
    if config.data.kind == "chat":
        check_chat(parallel)
    if config.model.size is None:
        return
    model = _skeleton(config)
    try:
        Layout(**sizes).check(model)
        check_stages(config, model.config.num_hidden_layers)
        if parallel.sequence_parallel and config.data.sequence % parallel.tp:
            raise UserError(
                f"data.sequence={config.data.sequence} cannot be divided by tp={parallel.tp}: choose another length, or "
                "sequence_parallel=false."
            )
    except UserError as error:
        raise UserError(f"In [parallel]: {error}") from None


def check_chat(parallel: Parallel) -> None:
    """Raise a UserError if a layout cannot leave prompts out of the loss."""
    if parallel.tp > 1 or parallel.pp > 1:
        raise UserError(
            "Conversations, whose prompts are left out of the loss, train with dp_replicate and dp_shard, and not with "
            f"tp={parallel.tp} and pp={parallel.pp}: set both to 1 in [parallel]."
        )


def _skeleton(config: Config) -> CausalLM:
    """Return the model of a preset without memory for its weights, converted to the first plan of the run."""
    assert config.model.size is not None
    sources, vocab = config.data.sources, config.model.vocab
    if vocab is None:  # the head's only size; prepared tokens bring their own tokenizer, and the head is not converted
        prepared = len(sources) == 1 and is_prepared(sources[0])
        vocab = 257 if prepared else load_tokenizer(config.data.tokenizer).vocab_size
    model = skeleton(preset(config.model.size, vocab_size=vocab))
    convert(model, config.precision.load_plan(), seed=config.run.seed, emulate=True)
    return model
