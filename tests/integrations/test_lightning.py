"""Lightning's Trainer and Fabric train converted models: the bits of an own loop, also after a resume."""

import functools
import importlib
import sys

import pytest
import torch
from lazily import Lazy
from torch import Tensor, nn

import dither
from dither import UserError
from dither.nn import Linear, convert, param_groups, step_context
from dither.spec import Sampling

lightning = Lazy("lightning")
integration = Lazy("dither.integrations.lightning")

REMARKS = (
    ".*does not have many workers",
    ".*tensorboardX",
    ".*isinstance.treespec",
    ".*srun.*",
    ".*num_workers",
    ".*no `val_dataloader`",
    "Be aware that when using",
    "You.re resuming from a checkpoint that ended",
)
pytestmark = [pytest.mark.filterwarnings(f"ignore:{remark}") for remark in REMARKS]

X = torch.randn(8, 32, generator=torch.Generator().manual_seed(1))
PLAN = dither.recipe("fp4-block").with_sampling(Sampling(b_init=1.0, b_target=0.5))


def build() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.SiLU(), nn.Linear(64, 32))
    convert(model, PLAN)
    return model


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return dither.optim.AdamW(param_groups(model), lr=1e-2)


def own_loop(steps: int) -> nn.Module:
    model = build()
    optimizer = optimizer_of(model)
    for step in range(steps):
        with step_context(model, step=step):
            for x in X[4 * (step % 2) :][:4].chunk(2):
                (model(x).square().mean() / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def assert_same(one: nn.Module, other: nn.Module) -> None:
    assert list(one.state_dict()) == list(other.state_dict())
    different = [name for name, value in one.state_dict().items() if not torch.equal(value, other.state_dict()[name])]
    assert different == []


def is_active(model: nn.Module) -> bool:
    return any(module.cache.active for module in model.modules() if isinstance(module, Linear))


@functools.cache
def module_class() -> type:
    class Module(lightning.LightningModule):
        def __init__(self, *, fails: bool = False) -> None:
            super().__init__()
            self.model, self.fails = build(), fails

        def training_step(self, x: Tensor, number: int) -> Tensor:
            if self.fails and number == 1:
                raise RuntimeError("stop here")
            return self.model(x).square().mean()

        def validation_step(self, x: Tensor, _: int) -> None:
            self.log("held_out", self.model(x).square().mean())

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer_of(self.model)

    return Module


def fit(folder, module, steps: int, *, resume=None, validate=False, saves=False, rows: Tensor = X):
    quiet = {"logger": False, "enable_checkpointing": saves, "enable_progress_bar": False, "enable_model_summary": False}
    saver = lightning.pytorch.callbacks.ModelCheckpoint(str(folder), save_top_k=-1, every_n_train_steps=1)
    trainer = lightning.Trainer(
        max_steps=steps, accelerator="cpu", devices=1, accumulate_grad_batches=2, default_root_dir=str(folder),
        plugins=[integration.DitherPrecision()], val_check_interval=1 if validate else None, num_sanity_val_steps=0,
        callbacks=[saver] if saves else [], **quiet,
    )  # fmt: skip
    held_out = torch.utils.data.DataLoader(X[:2], batch_size=2)
    trainer.fit(module, torch.utils.data.DataLoader(rows, batch_size=2), held_out if validate else None, ckpt_path=resume)
    return trainer


@pytest.mark.parametrize("validate", [False, True])
def test_lightnings_trainer_is_the_own_loop(validate, tmp_path):
    module = module_class()()
    trainer = fit(tmp_path, module, 2, validate=validate)
    assert trainer.precision_plugin.step == 2
    assert_same(module.model, own_loop(2))
    assert not is_active(module)


def test_lightnings_trainer_resumes_at_its_step(tmp_path):
    """In the middle of an epoch, where Lightning begins the data anew: all micro-batches are equal."""
    rows = X[:2].repeat(8, 1)
    straight, resumed = module_class()(), module_class()()
    fit(tmp_path, straight, 4, saves=True, rows=rows)
    fit(tmp_path, resumed, 4, resume=tmp_path / "epoch=0-step=2.ckpt", rows=rows)
    assert_same(resumed.model, straight.model)


def test_an_error_leaves_no_step_open(tmp_path):
    module = module_class()(fails=True)
    with pytest.raises(RuntimeError, match="stop here"):
        fit(tmp_path, module, 2)
    assert not is_active(module)


def fabric_loop(model: nn.Module, plugin, first: int, last: int, path=None, resume=None) -> nn.Module:
    fabric = lightning.Fabric(accelerator="cpu", devices=1, plugins=[plugin])
    wrapped, optimizer = fabric.setup(model, optimizer_of(model))
    state = {"model": wrapped, "optimizer": optimizer, "precision": plugin}
    if resume is not None:
        fabric.load(resume, state)
    for step in range(first, last):
        for x in X[4 * (step % 2) :][:4].chunk(2):
            fabric.backward(wrapped(x).square().mean() / 2)
        with torch.no_grad():
            wrapped(X[:2])
        optimizer.step()
        optimizer.zero_grad()
    if path is not None:
        fabric.save(path, state)
    return model


def test_fabric_is_the_own_loop_and_resumes(tmp_path):
    path = tmp_path / "two.ckpt"
    half = fabric_loop(build(), integration.DitherFabricPrecision(), 0, 2, path=path)
    assert_same(half, own_loop(2))
    plugin = integration.DitherFabricPrecision()
    assert_same(fabric_loop(build(), plugin, 2, 4, resume=path), own_loop(4))
    assert plugin.step == 4
    first, second = build(), build()
    plugin = integration.DitherFabricPrecision()
    plugin.convert_module(first)
    with pytest.raises(UserError, match="one converted model"):
        plugin.convert_module(second)


def test_an_error_in_fabric_leaves_no_step_open():
    model, plugin = build(), integration.DitherFabricPrecision()
    wrapped = lightning.Fabric(accelerator="cpu", devices=1, plugins=[plugin]).setup(model)
    with pytest.raises(UserError, match="has a weight of shape"):
        wrapped(X[:, :5])
    assert not is_active(model)


def test_a_missing_library_is_named(monkeypatch):
    importlib.import_module("dither.integrations.lightning")
    monkeypatch.setitem(sys.modules, "lightning.fabric.plugins.precision", None)
    monkeypatch.delitem(sys.modules, "dither.integrations.lightning")
    with pytest.raises(UserError, match=r"dither\[lightning\]"):
        import dither.integrations.lightning  # noqa: F401
