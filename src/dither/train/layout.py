"""The layout of a run: which part of the batch and of the model each rank has, and the exchanges that follow from it.

Without a cut every rank holds the whole model, and gradients are all-reduced after the step's last backward pass. Otherwise the
model is sharded by `dither.parallelize`, and FSDP2 reduces gradients in the last backward pass of a step.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from dither.data import load_tokenizer, prepared_folder
from dither.errors import UserError
from dither.models import CausalLM
from dither.models.presets import skeleton
from dither.nn import convert
from dither.nn.bitwidths import learned_parameters
from dither.nn.norms import cast_parameters
from dither.optim import Training
from dither.optim.training import parameter_dtype
from dither.parallel import Layout, parallelize
from dither.parallel.apply import recompute_blocks
from dither.snip.options import options
from dither.snip.planning import check_goal
from dither.train.config import Config, Parallel
from dither.train.ranks import Ranks


@dataclass(frozen=True)
class RankLayout:
    """This rank's place in the layout of a run.

    >>> alone = RankLayout.of(Config(), Ranks(torch.device("cpu")))
    >>> alone.cut, alone.data_rank, alone.data_world
    (False, 0, 1)
    """

    ranks: Ranks
    layout: Layout
    mesh: DeviceMesh | None = field(default=None, compare=False, repr=False)
    """The mesh of a run whose model is cut; None if every rank holds the whole model."""
    data_group: Any = field(default=None, compare=False, repr=False)
    """The ranks with other samples and the same part of the model, up to shards of FSDP2; None if this is the only one."""

    @classmethod
    def of(cls, config: Config, ranks: Ranks) -> "RankLayout":
        """Return the layout of a config for the ranks of a run. Every rank must call this, and all raise alike."""
        layout = Layout(**config.parallel.sizes(ranks.world))
        if not config.parallel.cuts:
            return cls.whole(ranks)
        mesh = layout.mesh(ranks.device.type)
        group = _data_group(mesh, layout)
        assert dist.group.WORLD is not None
        limit = dist.group.WORLD._get_backend(ranks.device).options._timeout
        for each in (*mesh.get_all_groups(), *([] if group is None else [group])):
            if each is not dist.group.WORLD:
                _set_pg_timeout(limit, each)  # else a frozen rank is waited for half an hour
        return cls(ranks, layout, mesh, group)

    @classmethod
    def whole(cls, ranks: Ranks) -> "RankLayout":
        """Return the layout in which every rank holds the whole model."""
        return cls(ranks, Layout(dp_replicate=ranks.world), data_group=ranks.group)

    @property
    def cut(self) -> bool:
        """True if ranks hold parts of the model: then all of them must take part in each pass."""
        return self.mesh is not None

    @property
    def saving_group(self) -> dist.ProcessGroup | None:
        """The ranks that write checkpoints together; None if one rank writes the whole model."""
        return dist.group.WORLD if self.cut else None

    def _coordinate(self, name: str) -> int:
        return 0 if self.mesh is None else self.mesh.get_local_rank(name)

    @property
    def data_world(self) -> int:
        """Number of parts into which the batch is divided."""
        return self.layout.batch_parts

    @property
    def data_rank(self) -> int:
        """This rank's part of the batch. Ranks of one tensor-parallel group, and of one pipeline, have the same."""
        if self.mesh is None:
            return self.ranks.rank
        return self._coordinate("dp_replicate") * self.layout.dp_shard + self._coordinate("dp_shard")

    @property
    def part(self) -> tuple[int, int, int]:
        """This rank's part of the model: (stage, shard, tensor-parallel rank). Ranks with the same part are replicas."""
        return self._coordinate("pp"), self._coordinate("dp_shard"), self._coordinate("tp")

    @property
    def replicas(self) -> list[list[int]]:
        """The ranks of the run in groups with the same part of the model."""
        if self.mesh is None:
            return [list(range(self.ranks.world))]
        groups: list[list[int]] = self.mesh.mesh.permute(0, 2, 3, 1).reshape(-1, self.layout.dp_replicate).tolist()
        return groups

    @property
    def last_of_pipeline(self) -> bool:
        """True on the ranks of the last stage."""
        return self._coordinate("pp") == self.layout.pp - 1

    @property
    def pipeline_group(self) -> Any:
        """The ranks of this pipeline, in the order of its stages; None if there is one stage."""
        return None if self.mesh is None or self.layout.pp == 1 else self.mesh.get_group("pp")

    @property
    def counted(self) -> float:
        """1 on the one rank of those with the same samples whose loss is counted, else 0."""
        return float(self.last_of_pipeline and self._coordinate("tp") == 0)

    def describe(self) -> str:
        """Return the ranks and how they share the model, as the end of a sentence."""
        if self.ranks.world == 1:
            return "."
        return f" with {self.ranks.world} ranks" + (f" ({self.layout})." if self.cut else ".")

    # The model ---------------------------------------------------------------------------------------------------------

    def shard(self, model: nn.Module, config: Config, stages: Sequence[nn.Module] = ()) -> None:
        """Bring a converted model to the dtype of the mode, and shard it in place; raise on every rank if it does not fit.

        Args:
            model: The model, or all stages of a pipeline that this rank has.
            config: The config of the run.
            stages: The stages of this rank, if there are any.
        """
        settings = config.parallel
        if self.mesh is None:
            if settings.checkpointing != "none":
                recompute_blocks(model, settings.checkpointing)
            return
        check_mode(config)
        if not stages:
            self.layout.check(model)
        mode = config.precision.dtypes
        skip = {id(parameter) for parameter in learned_parameters(model)}
        cast_parameters(model, parameter_dtype(mode), all_norms=mode.plan.master, skip=skip)
        for part in stages or [model]:
            parallelize(
                part,
                self.mesh,
                sequence_parallel=settings.sequence_parallel,
                loss_parallel=settings.loss_parallel,
                checkpointing=settings.checkpointing,
                gather=settings.gather,
                reduce=settings.reduce,
                seed=config.run.seed,
            )
            for module in part.modules():
                if isinstance(module, FSDPModule):
                    # Losses are divided by the number of ranks already: gradients are sums, as in a run without shards.
                    module.set_gradient_divide_factor(1.0)
                    module.set_force_sum_reduction_for_comms(True)

    def synchronize(self, model: nn.Module, last: bool) -> None:
        """Let FSDP2 reduce gradients in the next backward pass only if it is the last of a step."""
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(last)
            model.set_is_last_backward(last)

    def reduce_gradients(self, training: Training) -> None:
        """Sum the gradients of a step over ranks, unless FSDP2 has done so, and place them like their parameters."""
        if not self.cut:
            training.gradients.all_reduce(self.ranks.group)
            return
        for parameter in training.model.parameters():
            grad = parameter.grad
            if isinstance(parameter, DTensor) and isinstance(grad, DTensor) and grad.placements != parameter.placements:
                parameter.grad = grad.redistribute(parameter.device_mesh, parameter.placements)

    # Exchanges ---------------------------------------------------------------------------------------------------------

    def any(self, flag: bool) -> bool:
        """Return whether the flag is set on any rank, if the model is cut; else whether it is on this one."""
        if not self.cut:
            return flag
        return bool(self.ranks.add(torch.tensor(float(flag), device=self.ranks.device)))


def check_mode(config: Config) -> None:
    """Raise if a mode, or what else a config asks for, cannot train a sharded model."""
    check_gather(config)
    precision = config.precision
    mode = precision.dtypes
    if mode.plan.loss_scaling:
        raise UserError(
            f"precision.mode={precision.mode!r} scales losses, which is not possible for a model that [parallel] shards: "
            "use a bfloat16 mode or fp32, or dp_replicate alone."
        )
    kind = precision.gradients or mode.gradients
    dtype = torch.float32 if kind == "fp32" else torch.bfloat16
    if kind == "bf16-sr" or dtype != parameter_dtype(mode):
        raise UserError(
            f"precision.mode={precision.mode!r} with precision.gradients={kind!r} keeps gradients in another form than "
            f"{str(parameter_dtype(mode)).removeprefix('torch.')} parameters, and a model that is sharded by [parallel] has "
            "those of its parameters: use the mode o1, fp32, bf16-rn, bf16-sr or bf16-kahan with its own gradients."
        )


def check_gather(config: Config) -> None:
    """Raise if codes are gathered in place of weights, and something else reads weights or changes their casts."""
    if config.parallel.gather == "weights":
        return
    readers = {
        "snip.target": config.snip.target is not None,
        "monitor.every": bool(config.monitor.every),
        "precision.schedule": len(config.precision.entries) > 1,
    }
    if reader := next((name for name, used in readers.items() if used), None):
        raise UserError(f"parallel.gather='codes' leaves no whole weights, which {reader} needs: use gather='weights'.")


def check_stages(config: Config, layers: int) -> None:
    """Raise if a pipeline has more stages than layers, or is asked for what pipelines cannot do."""
    parallel = config.parallel
    if parallel.pp == 1:
        return
    if config.monitor.every:
        raise UserError(
            f"monitor.every={config.monitor.every} looks at a whole model, and parallel.pp={parallel.pp} cuts it: set it to 0."
        )
    if config.guard.recompute_every and parallel.stages > parallel.pp:
        raise UserError(
            f"guard.recompute_every={config.guard.recompute_every} needs a pipeline with one stage per rank, and "
            f"parallel.schedule={parallel.schedule!r} has two: set it to 0."
        )
    if config.run.compile and parallel.schedule == "zero-bubble":
        raise UserError(
            "parallel.schedule='zero-bubble' splits backward passes, which compiled blocks cannot: set run.compile=false."
        )
    if parallel.stages > layers:
        raise UserError(
            f"parallel.pp={parallel.pp} with schedule={parallel.schedule!r} has {parallel.stages} stages, and the model has "
            f"{'1 layer' if layers == 1 else f'{layers} layers'}: each stage needs at least one."
        )


def _data_group(mesh: DeviceMesh, layout: Layout) -> Any:
    """Return the group of the ranks that share a batch; None if there is one. Every rank creates all of them."""
    if layout.batch_parts == 1:
        return None
    if layout.batch_parts == dist.get_world_size():
        return dist.group.WORLD
    if layout.dp_replicate == 1:
        return mesh.get_group("dp_shard")
    if layout.dp_shard == 1:
        return mesh.get_group("dp_replicate")
    # ranks[pp, dp_replicate, dp_shard, tp]
    ranks = mesh.mesh.permute(0, 3, 1, 2).reshape(-1, layout.batch_parts).tolist()
    own, _ = dist.new_subgroups_by_enumeration(ranks)  # type: ignore[no-untyped-call]
    return own


# Before the text is read and the model is built ---------------------------------------------------------------------------


def check_snip(config: Config) -> None:
    """Raise a UserError if no plan can reach the goal of `[snip]`. Models of Hugging Face are checked when they are built.

    >>> from dither.snip import SnipSettings
    >>> check_snip(Config(snip=SnipSettings(target=0.5, pinned=("*.down=fp8-block",))))
    Traceback (most recent call last):
    dither.errors.UserError: In [snip]: The pinned '*.down' matches no layer: there is model.layers.0.self_attn.q_proj, ...
    """
    if config.snip.target is None or not config.model.ours:
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
    if not config.model.ours:
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
    vocab = config.model.vocab
    if vocab is None:  # the head's only size; prepared tokens bring their own tokenizer, and the head is not converted
        vocab = 257 if prepared_folder(config.data.sources) else load_tokenizer(config.data.tokenizer).vocab_size
    model = skeleton(config.model.sizes(vocab))
    convert(model, config.precision.load_plan(), seed=config.run.seed, emulate=True)
    return model
