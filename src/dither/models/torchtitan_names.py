"""Names and layouts of torchtitan's Llama 3, whose checkpoints `dither train --from` takes."""

import re

from torch import Tensor

PREFIXES = ("", "model.", "module.", "model.module.", "state_dict.", "state_dict.model.")
"""Names under which a checkpoint may hold the state of the model."""

LAYER = {
    "self_attn.q_proj": ("attention.wq", "attention.qkv_linear.wq"),
    "self_attn.k_proj": ("attention.wk", "attention.qkv_linear.wk"),
    "self_attn.v_proj": ("attention.wv", "attention.qkv_linear.wv"),
    "self_attn.o_proj": ("attention.wo",),
    "mlp.gate_proj": ("feed_forward.w1",),
    "mlp.up_proj": ("feed_forward.w3",),
    "mlp.down_proj": ("feed_forward.w2",),
    "input_layernorm": ("attention_norm",),
    "post_attention_layernorm": ("ffn_norm",),
}
"""The names of a layer's modules here and in versions of torchtitan."""

OTHERS = {
    "model.embed_tokens.weight": ("tok_embeddings.weight",),
    "model.norm.weight": ("norm.weight",),
    "lm_head.weight": ("output.weight", "lm_head.weight"),
}


def titan_names(name: str) -> tuple[str, ...]:
    """Return the names that torchtitan may have for a tensor of our Llama.

    >>> titan_names("model.layers.3.self_attn.q_proj.weight")
    ('layers.3.attention.wq.weight', 'layers.3.attention.qkv_linear.wq.weight')
    """
    match = re.fullmatch(r"model\.layers\.([0-9]+)\.(.+)\.(weight|bias)", name)
    if match is None:
        return OTHERS.get(name, ())
    number, module, kind = match.groups()
    return tuple(f"layers.{number}.{theirs}.{kind}" for theirs in LAYER.get(module, ()))


def rotates(name: str) -> bool:
    """Return whether a tensor's rows are rotated by rotary embeddings: those of queries and keys.

    >>> rotates("model.layers.3.self_attn.q_proj.weight"), rotates("model.layers.3.self_attn.v_proj.weight")
    (True, False)
    """
    return re.search(r"\.self_attn\.[qk]_proj\.", name) is not None


def halves_from_pairs(weight: Tensor, head_size: int) -> Tensor:
    """Return the rows of queries or keys in our order.

    torchtitan rotates neighbouring rows of a head with each other; our models, like Hugging Face's, rotate a row of the first
    half with one of the second half.

    >>> import torch
    >>> halves_from_pairs(torch.arange(8.0)[:, None], head_size=4)[:, 0]
    tensor([0., 2., 1., 3., 4., 6., 5., 7.])
    """
    rows = weight.reshape(-1, head_size // 2, 2, *weight.shape[1:])
    return rows.transpose(1, 2).reshape(weight.shape)
