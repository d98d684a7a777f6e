"""Noise of training in every layout, on 2, 3, 4 and 8 ranks (gloo): that of one process, for every method.

One process trains a step of the trainer and records what its layers read and return in each micro-batch. Ranks train the same
step. Without tensor parallelism, outputs and gradients of a layer must be equal bit by bit: one random bit that was drawn
elsewhere, or one scale of other numbers, would change them. Tensor parallelism sums in another order. Codes and samples of
weights must be equal all the same, and the outputs of the layers that read the embedding up to the error of float32. Behind
them a rounding may fall on the other side and change many others, so outputs are compared roughly.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from sweeps import only
from test_parallelize import cut, reading, whole
from torch import Tensor, nn
from worlds import ranks

import dither
from dither import LayerPrecision, Plan
from dither.data import open_corpus, open_tokens
from dither.data.settings import TOKENS
from dither.models import PRESETS, LlamaConfig
from dither.parallel import Layout
from dither.train import Config
from dither.train import config as configs
from dither.train.layout import RankLayout
from dither.train.ranks import Ranks
from dither.train.trainer import Trainer

pytestmark = pytest.mark.filterwarnings("ignore:.*noise can vanish")

PLANS = {
    "fp8-block": LayerPrecision.of("e4m3 tile(8)", "e4m3 block(8)", "e4m3 tile(8)"),
    "fp4-block": LayerPrecision.of("e2m1 tile(8)", "e2m1 block(8) fp32 stochastic(16)", "e2m1 tile(8) stochastic(16)"),
    "mxfp8": LayerPrecision.of("e4m3 tile(8) pow2_ceil", "e4m3 tile(8) pow2_ceil stochastic(8)", "e4m3 tile(8) pow2_ceil"),
}
PLANS["gaussws-fp4"] = PLANS["fp4-block"]
"""Precisions in small groups, which 8 ranks can share."""
SAMPLED = ("precision.sampling.noise=rounded_normal", "precision.sampling.block=8")
METHODS: dict[str, Sequence[str]] = {
    **dict.fromkeys(PLANS, ()),
    "gaussws": ("precision.recipe=fp32", *SAMPLED),
    "gaussws-fp4": (*SAMPLED, "precision.sampling.b_init=2", "precision.sampling.b_target=2"),
    "bf16-sr": ("precision.mode=bf16-sr",),
    "dynamic8": ("precision.states=dynamic8",),
    "adam-mini": ("optim.optimizer=adam-mini",),
}
LAYOUTS = {
    "DDP": [Layout(dp_replicate=size) for size in (2, 3, 4, 8)],
    "FSDP2": [Layout(dp_shard=size) for size in (2, 3, 4, 8)],
    "TP": [Layout(tp=size) for size in (2, 3, 4, 8)],
    "PP": [Layout(pp=size) for size in (2, 3, 4, 8)],
    "FSDP2 x TP": [Layout(dp_shard=2, tp=2), Layout(dp_shard=4, tp=2), Layout(dp_shard=2, tp=4)],
    "FSDP2 x PP": [Layout(dp_shard=2, pp=2), Layout(dp_shard=4, pp=2), Layout(dp_shard=2, pp=4)],
    "TP x PP": [Layout(tp=2, pp=2), Layout(tp=4, pp=2), Layout(tp=2, pp=4)],
}


@dataclass(frozen=True)
class Case:
    """A layout, a method and the folder of the tokens."""

    layout: Layout
    method: str
    folder: Path

    @property
    def sizes(self) -> LlamaConfig:
        """The model: shards of its features are multiples of the groups, for the states of dynamic8 too."""
        tp = self.layout.tp
        width = 128 * tp if self.method == "dynamic8" and tp > 1 else 192
        return LlamaConfig(
            hidden_size=width,
            num_hidden_layers=max(2, self.layout.pp),
            num_attention_heads=width // 8,
            intermediate_size=width,
            vocab_size=264,
        )

    def settings(self, parallel: bool) -> Config:
        layout = self.layout
        more = [f"data.sequence={24 if layout.tp == 3 else 8}", f"data.batch={layout.batch_parts * layout.pp}"]
        more += ["data.micro_batch=1", "model.preset=narrow", "model.vocab=264", "run.device=cpu", "run.eval_sequences=1"]
        # An update as large as the weights' units in the last place, so that stochastic roundings of weights are seen.
        more += ["optim.lr=0.001", "optim.warmup=0", *METHODS[self.method]]
        if self.method in PLANS:
            more += [f'precision.plan="{self.folder / self.method}.json"']
        if parallel:
            more += [f"parallel.{name}={size}" for name, size in layout.sizes.items() if size > 1]
        return configs.override(Config(), [f'data.sources=["{self.folder / "text"}"]', f'run.out="{self.folder}"', *more])

    @property
    def reference(self) -> Path:
        """The file of what one process reads and computes."""
        return self.folder / f"{self.method}.pt"


@contextlib.contextmanager
def preset_of(case: Case) -> Iterator[None]:
    known = {"narrow": case.sizes}
    with mock.patch.dict(PRESETS, known):
        yield


@contextlib.contextmanager
def results(model: nn.Module) -> Iterator[dict[str, dict[int, Tensor]]]:
    """Yield the outputs of layers ("y NAME") and their gradients ("dy NAME"), by the number of the pass."""
    found: dict[str, dict[int, Tensor]] = {}

    def hook(layer: dither.Linear, _: Any, y: Tensor) -> None:
        passes = found.setdefault(f"y {layer.name}", {})
        number = len(passes)
        passes[number] = y.detach().clone()
        if y.requires_grad:
            y.register_hook(lambda grad: found.setdefault(f"dy {layer.name}", {}).update({number: grad.clone()}))

    handles = [layer.register_forward_hook(hook) for layer in model.modules() if isinstance(layer, dither.Linear)]
    yield found
    for handle in handles:
        handle.remove()


def step(trainer: Trainer) -> dict[str, Any]:
    """Train a step, and return what layers read and returned, the loss, the weights and the states of the optimizer."""
    layout = trainer.layout
    batch = trainer.loader.batch(0, layout.data_rank, layout.data_world)
    with reading(trainer.model) as read, results(trainer.model) as found:
        loss = trainer.step(batch)[0]
    states = {
        f"{name} {key}": whole(state)
        for name, p in trainer.model.named_parameters()
        for key, state in trainer.training.optimizer.state[p].items()
        if isinstance(state, Tensor) and state.dtype == torch.uint8
    }
    weights = {name: whole(p).detach() for name, p in trainer.model.named_parameters()}
    return {"first": batch.first, "read": read, "results": found, "loss": loss, "weights": weights, "states": states}


def check_noise(case: Case) -> None:
    here = Ranks(torch.device("cpu"), dist.get_rank(), dist.get_world_size())
    with preset_of(case):
        config = case.settings(parallel=True)
        layout = RankLayout.of(config, here)
        trainer = Trainer(config, open_tokens(case.folder / TOKENS, verify=False), here, layout=layout)
        mine = step(trainer)
    one = torch.load(case.reference, mmap=True, weights_only=True)
    tp, rank = case.layout.tp, dist.get_rank() % case.layout.tp
    layers = {layer.name for layer in trainer.model.modules() if isinstance(layer, dither.Linear)}
    assert layers
    assert set(mine["read"]) == layers <= set(one["read"])
    if tp > 1:  # otherwise weights are cast where they are read, and equal outputs show that they are equal
        for name in layers:
            assert mine["read"][name].keys() == one["read"][name].keys()
            for key, value in mine["read"][name].items():
                assert torch.equal(cut(one["read"][name][key].float(), value, rank), value.float()), (name, key)
    assert {key.split()[1] for key in mine["results"]} == layers
    for key, passes in mine["results"].items():
        assert set(passes) == set(range(case.layout.pp)), key
        for number, value in passes.items():
            known = one["results"][key][mine["first"] + number]
            if tp == 1:
                assert torch.equal(value, known), (key, number)
            else:
                known = cut(known, value, rank).float()
                assert (value.float() - known).norm() <= bound_of(key, value.dtype) * known.norm(), (key, number)
    exact = tp == 1 and case.method != "bf16-sr"
    assert float(mine["loss"]) == pytest.approx(float(one["loss"]), rel=1e-5 if exact else 1e-3)
    for kind in ("weights", "states"):
        check_nearly(mine[kind], one[kind], summed_alike=tp == 1)
    assert bool(mine["states"]) == (case.method == "dynamic8")


def bound_of(key: str, dtype: torch.dtype) -> float:
    """Return how far an output may be from that of one process under tensor parallelism, as a share of its norm."""
    first = key.startswith("y model.layers.0.self_attn.") and not key.endswith("o_proj")
    return 0.3 if not first else 1e-5 if dtype == torch.float32 else 0.01


def check_nearly(found: dict[str, Tensor], known: dict[str, Tensor], *, summed_alike: bool) -> None:
    """Gradients that were summed in another order may move a number to its neighbour.

    Tensor parallelism also changes activations in the last place, and a rounding that falls on the other side changes others
    behind it. In one process whose embedding was moved by one unit in the last place, up to 4.5 % of a stage's numbers moved
    and 12.4 % of one weight's (FP4, eight blocks); with other noise, 18 to 52 % of a stage's.
    """
    moved = []
    for name, value in found.items():
        assert value.dtype == known[name].dtype, name
        far = (value - known[name]).abs() > 1e-5 if value.dtype == torch.float32 else value != known[name]
        assert far.float().mean() <= (0.05 if summed_alike else 0.25), (name, float(far.float().mean()))
        moved.append(far.flatten())
    if moved:
        share = float(torch.cat(moved).float().mean())
        assert share <= (0.05 if summed_alike else 0.1), share


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("noise")
    (made / "text").mkdir()
    for number in range(60):
        (made / "text" / f"{number}.txt").write_text(f"{number} bottles of beer on the wall, take {number % 7} down. " * 5)
    for name, precision in PLANS.items():
        (made / f"{name}.json").write_text(Plan(default=precision).to_json())
    config = configs.override(Config(), [f'data.sources=["{made / "text"}"]', f'run.out="{made}"'])
    open_corpus(config.data, made)
    return made


ORDINARY = (Layout(tp=2, pp=2), "fp4-block")
CASES = [
    only((layout, method), (layout, method) == ORDINARY)
    for layouts in LAYOUTS.values()
    for layout in layouts
    for method in METHODS
]


@pytest.mark.parametrize(("layout", "method"), CASES, ids=str)
def test_noise_is_that_of_one_process(folder: Path, layout: Layout, method: str) -> None:
    case = Case(layout, method, folder)
    with preset_of(case):
        corpus = open_tokens(folder / TOKENS, verify=False)
        torch.save(step(Trainer(case.settings(parallel=False), corpus, Ranks(torch.device("cpu")))), case.reference)
    ranks(layout.ranks, check_noise, case)
