"""Hugging Face's Trainer and accelerate's loops train converted models: steps, checkpoints, resumption, logs, clean folders."""

import contextlib
import importlib
import io
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from lazily import Lazy
from safetensors import safe_open
from torch import nn

import dither
from dither import PlanSchedule, UserError
from dither.integrations.accelerate import OptimizerSteps
from dither.integrations.loops import FILE, load_state, save_state, state_names
from dither.nn import Linear, convert, param_groups, step_context
from dither.snip import Snip, SnipSettings
from dither.spec import Plan, Sampling

transformers = Lazy("transformers")
accelerate = Lazy("accelerate")
integration = Lazy("dither.integrations.transformers")

pytestmark = [pytest.mark.filterwarnings(f"ignore:{remark}") for remark in (".*pin_memory", "The dataloader")]

IDS = torch.randint(64, (48, 8), generator=torch.Generator().manual_seed(1))
ROWS = [{"input_ids": row, "labels": row} for row in IDS]
SAMPLING = Sampling(b_init=3.0, b_target=2.0, parts="od")
EVERYTHING = dither.recipe("fp8-block").with_sampling(SAMPLING)


def build(plan: Plan | str = EVERYTHING, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        max_position_embeddings=32, bos_token_id=0, eos_token_id=1, pad_token_id=2,
    )  # fmt: skip
    config.loss_type = "ForCausalLM"
    model = transformers.LlamaForCausalLM(config).to(dtype)
    convert(model, plan, seed=seed)
    return model


def optimizer_of(model: nn.Module, **options) -> torch.optim.Optimizer:
    return dither.optim.AdamW(param_groups(model), lr=1e-2, **options)


def arguments(folder, **options):
    chosen = {"max_steps": 7, "save_strategy": "steps", "save_steps": 4, "logging_steps": 1} | options
    return transformers.TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=2, gradient_accumulation_steps=2, report_to=[], use_cpu=True,
        disable_tqdm=True, dataloader_pin_memory=False, **chosen,
    )  # fmt: skip


def train(trainer, **options):
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.train(**options)
    return trainer


def make(kind: str, folder, model: nn.Module, optimizer=None, **options):
    """A Trainer with the callback, or a DitherTrainer."""
    given = {"train_dataset": ROWS, "optimizers": (optimizer or optimizer_of(model), None)}
    if kind == "trainer":
        return integration.DitherTrainer(model, arguments(folder, **options), **given)
    return transformers.Trainer(model, arguments(folder, **options), callbacks=[integration.DitherCallback()], **given)


def states(trainer) -> dict[str, torch.Tensor]:
    """Everything that a step depends on: weights, bitwidths, histories, moments."""
    found = {f"model {name}": value.clone() for name, value in trainer.model.state_dict().items()}
    optimizer = trainer.optimizer.optimizer.state_dict()
    for index, state in optimizer["state"].items():
        found |= {f"optimizer {index} {key}": value.clone() for key, value in state.items()}
    return found


def logs_of(trainer) -> list[dict]:
    """The logs of training steps, without times."""
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert set(one) == set(other)
    different = [name for name in one if not torch.equal(one[name], other[name])]
    assert different == []


# Resumption -------------------------------------------------------------------------------------------------------------


@pytest.mark.sampled(without=["callback"])
@pytest.mark.parametrize("kind", ["callback", "trainer"])
def test_a_resumed_run_with_everything_on_is_the_straight_run(kind, tmp_path):
    """BF16 weights rounded stochastically, 8-bit states, FP8 blocks, GaussWS of o_proj and down_proj; 7 of 12 steps."""

    def trainer():
        model = build(dtype=torch.bfloat16)
        optimizer = optimizer_of(model, weights="stochastic", states="dynamic8", seed=3)
        return make(kind, tmp_path, model, optimizer, max_steps=12, save_steps=7)

    straight = train(trainer())
    bitwidths = [layer.bitwidth for layer in straight.model.modules() if isinstance(layer, Linear) and layer.precision.sampled]
    assert len(bitwidths) == 2
    assert all((bitwidth != 1).all() for bitwidth in bitwidths)  # they have learned
    resumed = train(trainer(), resume_from_checkpoint=str(tmp_path / "checkpoint-7"))
    assert_same(states(straight), states(resumed))
    assert logs_of(resumed) == logs_of(straight)


def test_histories_and_a_changed_plan_are_restored(tmp_path):
    """Delayed scaling begins at step 2 of a schedule: the checkpoint of step 4 has histories that the first plan lacks."""

    def trainer():
        model = build("fp8-current")
        schedule = PlanSchedule([(0, "fp8-current"), (2, "fp8-delayed")])
        given = {"train_dataset": ROWS, "optimizers": (optimizer_of(model), None), "schedule": schedule}
        return integration.DitherTrainer(model, arguments(tmp_path), **given)

    straight = train(trainer())
    assert straight.state.log_history[1]["dither/plan_changes"] == 0
    assert straight.state.log_history[2]["dither/plan_changes"] == 1
    assert sum("history" in name for name in state_names(straight.model)) == 21
    resumed = train(trainer(), resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert_same(states(straight), states(resumed))
    assert logs_of(resumed) == logs_of(straight)


def test_a_checkpoint_moved_elsewhere_is_found_or_asked_for(tmp_path):
    straight = train(make("callback", tmp_path / "first", build()))
    moved = shutil.move(tmp_path / "first" / "checkpoint-4", tmp_path / "moved")
    with pytest.raises(UserError, match=r"DitherCallback\(resume_from"):
        train(make("callback", tmp_path / "second", build()), resume_from_checkpoint=str(moved))
    resumed = train(make("trainer", tmp_path / "second", build()), resume_from_checkpoint=str(moved))
    assert_same(states(straight), states(resumed))


def test_the_best_model_comes_with_its_bitwidths(tmp_path):
    options = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 2, "save_steps": 2, "learning_rate": 1.0}
    model = build()
    trainer = integration.DitherTrainer(
        model, arguments(tmp_path, greater_is_better=True, metric_for_best_model="eval_loss", **options),
        train_dataset=ROWS, eval_dataset=ROWS[:4], optimizers=(optimizer_of(model), None),
    )  # fmt: skip
    train(trainer)
    best = trainer.state.best_model_checkpoint
    assert not best.endswith("-7")  # the largest loss is an early one
    with safe_open(f"{best}/{FILE}", "pt") as file:
        for name in state_names(model):
            assert torch.equal(model.state_dict()[name], file.get_tensor(name))


def test_snip_in_the_trainer_resumes_between_its_estimates_and_its_choice(tmp_path):
    def choose(model, optimizer):
        return Snip(
            dither.Conversion.of(model), optimizer, SnipSettings(target=0.5, start=1, delay=2, probe="direct"),
            forward=lambda model, batch: model(**batch).loss,
        )  # fmt: skip

    def trainer():
        model = build("fp8-block")
        given = {"train_dataset": ROWS, "optimizers": (optimizer_of(model), None), "snip": choose}
        return integration.DitherTrainer(model, arguments(tmp_path, max_steps=5, save_steps=2), **given)

    straight = train(trainer())
    assert [entry["dither/plan_changes"] for entry in logs_of(straight)] == [0, 0, 0, 1, 1]
    assert 0 < logs_of(straight)[-1]["dither/weights_e2m1"] < 1
    resumed = train(trainer(), resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert_same(states(straight), states(resumed))
    assert logs_of(resumed) == logs_of(straight)


# Steps ------------------------------------------------------------------------------------------------------------------


def test_the_trainer_is_the_own_loop(tmp_path):
    """The same bits as two micro-batches inside step_context, clipped by 1 as the Trainer does."""
    options = {"max_steps": 2, "save_strategy": "no", "train_sampling_strategy": "sequential", "lr_scheduler_type": "constant"}
    plan = dither.recipe("fp4-block").with_sampling(Sampling(b_init=1.0, b_target=0.5))
    trainer = train(make("callback", tmp_path, build(plan), **options))
    model = build(plan).train()
    optimizer = optimizer_of(model)
    for step in range(2):
        with step_context(model, step=step):
            for ids in IDS[4 * step : 4 * step + 4].chunk(2):
                model(input_ids=ids, labels=ids, num_items_in_batch=torch.tensor(28)).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    assert_same(dict(model.state_dict()), dict(trainer.model.state_dict()))


def test_evaluation_and_gradient_checkpointing_change_nothing(tmp_path):
    plain = train(make("callback", tmp_path, build(), max_steps=3, save_strategy="no"))
    model = build()
    busy = transformers.Trainer(
        model,
        arguments(tmp_path, max_steps=3, save_strategy="no", eval_strategy="steps", eval_steps=1, gradient_checkpointing=True),
        train_dataset=ROWS,
        eval_dataset=ROWS[:2],
        optimizers=(optimizer_of(model), None),
        callbacks=[integration.DitherCallback()],
    )
    assert_same(states(plain), states(train(busy)))
    assert sum("eval_loss" in entry for entry in busy.state.log_history) == 3


def test_an_error_leaves_no_step_open(tmp_path):
    class Failing(transformers.TrainerCallback):
        def on_pre_optimizer_step(self, *_, **__) -> None:
            raise RuntimeError("stop here")

    model = build()
    given = {"train_dataset": ROWS, "optimizers": (optimizer_of(model), None), "callbacks": [Failing()]}
    trainer = integration.DitherTrainer(model, arguments(tmp_path), **given)
    with pytest.raises(RuntimeError, match="stop here"):
        train(trainer)
    assert not any(module.cache.active for module in model.modules() if isinstance(module, Linear))


# Logs -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["callback", "trainer"])
def test_bitwidths_and_formats_are_logged(kind, tmp_path):
    trainer = train(make(kind, tmp_path, build(), max_steps=2, save_strategy="no"))
    entry = next(entry for entry in reversed(trainer.state.log_history) if "loss" in entry)
    assert entry["dither/weights_e4m3"] == 1
    assert 2.9 < entry["dither/bitwidth_min"] <= entry["dither/bitwidth_mean"] <= entry["dither/bitwidth_max"] < 3.1
    assert entry["dither/plan_changes"] == 0


# Folders ----------------------------------------------------------------------------------------------------------------


def test_folders_are_clean_and_the_state_comes_back(tmp_path):
    model = build(dither.recipe("fp8-delayed").with_sampling(SAMPLING))
    with step_context(model, step=0):
        model(input_ids=IDS[:2], labels=IDS[:2]).loss.backward()
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.bitwidth.fill_(0.5)
    integration.save_pretrained(model, tmp_path)
    loaded, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    convert(loaded, dither.recipe("fp8-delayed").with_sampling(SAMPLING))
    load_state(loaded, tmp_path)
    assert_same(dict(model.state_dict()), dict(loaded.state_dict()))


def test_folders_of_experts_are_clean(tmp_path):
    config = transformers.MixtralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
        num_local_experts=2, max_position_embeddings=32,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config, experts_implementation="eager")
    convert(model, "fp8-delayed")
    integration.save_pretrained(model, tmp_path)
    _, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    load_state(model, tmp_path)


def test_checkpoints_of_the_trainer_are_clean(tmp_path):
    trainer = train(make("callback", tmp_path, build(dither.recipe("fp8-delayed").with_sampling(SAMPLING)), max_steps=4))
    trainer.save_model(tmp_path / "final")
    for folder in ("checkpoint-4", "final"):
        _, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / folder, output_loading_info=True)
        assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert (tmp_path / "checkpoint-4" / FILE).is_file()


def test_states_of_another_model_are_refused(tmp_path):
    model = build()
    save_state(model, tmp_path)
    with pytest.raises(UserError, match="seed=0"):
        load_state(build(seed=1), tmp_path)
    other = build()
    with torch.no_grad():
        other.model.layers[0].mlp.up_proj.weight.add_(1)
    with pytest.raises(UserError, match="load the weights of that folder"):
        load_state(other, tmp_path)
    with pytest.raises(UserError, match="has a converted layer"):
        load_state(nn.Sequential(nn.Linear(64, 64)), tmp_path)
    (tmp_path / FILE).write_bytes(b"no tensors")
    with pytest.raises(UserError, match="cannot be read"):
        load_state(model, tmp_path)
    with pytest.raises(UserError, match="There is no training state"):
        load_state(model, tmp_path / "nowhere")


def test_resting_bitwidths_are_kept(tmp_path):
    """A sampling that the plan in force has switched off keeps its bitwidths."""
    model, again = build(), build()
    dither.Conversion.of(model).switch("bf16")
    layer = "model.layers.0.mlp.down_proj"
    with torch.no_grad():
        model.get_submodule(layer).resting_bitwidths["bitwidth"].fill_(0.25)
    save_state(model, tmp_path)
    before = again.get_submodule(layer).bitwidth
    load_state(again, tmp_path)
    dither.Conversion.of(again).switch(EVERYTHING)
    assert again.get_submodule(layer).bitwidth is before  # the parameter that an optimizer has
    assert (before == 0.25).all()


# Optimizers -------------------------------------------------------------------------------------------------------------


@pytest.mark.sampled(without=["False"])
@pytest.mark.parametrize("given", [False, True])
def test_optimizer_cls_and_kwargs_with_stochastic_rounding(given, tmp_path):
    """Names are given in params=, or the callback finds them; a resumed run draws the bits of the straight one."""

    def trainer():
        model = build("fp8-block", dtype=torch.bfloat16)
        options = {"lr": 1e-2, "weights": "stochastic", "seed": 5} | ({"params": param_groups(model)} if given else {})
        return transformers.Trainer(
            model, arguments(tmp_path, max_steps=4, save_steps=2), train_dataset=ROWS, callbacks=[integration.DitherCallback()],
            optimizer_cls_and_kwargs=(dither.optim.AdamW, options),
        )  # fmt: skip

    straight = train(trainer())
    groups = straight.optimizer.optimizer.param_groups
    assert sorted(name for group in groups for name in group["param_names"]) == sorted(dict(straight.model.named_parameters()))
    assert_same(states(straight), states(train(trainer(), resume_from_checkpoint=str(tmp_path / "checkpoint-2"))))


# accelerate -------------------------------------------------------------------------------------------------------------


def accelerated(folder, plan: Plan, upto: int, *, resume: bool = False, clip: bool = True) -> nn.Module:
    """Accelerate's documented order, two micro-batches per step; the state is saved after two steps."""
    model = build(plan, dtype=torch.bfloat16).train()
    optimizer = optimizer_of(model, weights="stochastic", states="dynamic8")
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    loader = torch.utils.data.DataLoader(ROWS, batch_size=2)
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    steps = OptimizerSteps(accelerator, model)
    accelerator.register_for_checkpointing(steps)
    if resume:
        accelerator.load_state(folder)
    for batch in accelerator.skip_first_batches(loader, 2 * steps.step):
        with accelerator.accumulate(model), steps:
            accelerator.backward(model(**batch).loss)
            if accelerator.sync_gradients and clip:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients and steps.step == 2 and not resume:
            accelerator.save_state(folder)
        if steps.step == upto:
            break
    return accelerator.unwrap_model(model)


STOCHASTIC = dither.recipe("fp4-block").with_sampling(Sampling(b_init=1.0, b_target=0.5))


def test_accelerates_documented_order_is_the_own_loop(tmp_path):
    found = accelerated(tmp_path, STOCHASTIC, 2, clip=False)
    model = build(STOCHASTIC, dtype=torch.bfloat16).train()
    optimizer = optimizer_of(model, weights="stochastic", states="dynamic8")
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    for step in range(2):
        with step_context(model, step=step):
            for ids in IDS[4 * step : 4 * step + 4].chunk(2):
                (model(input_ids=ids, labels=ids).loss / 2).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    assert_same(dict(model.state_dict()), dict(found.state_dict()))


def test_accelerate_resumes_at_its_step(tmp_path):
    straight = accelerated(tmp_path, STOCHASTIC, 4)
    resumed = accelerated(tmp_path, STOCHASTIC, 4, resume=True)
    assert_same(dict(straight.state_dict()), dict(resumed.state_dict()))


def test_optimizer_steps_need_an_accelerator():
    model = build("fp8-block")
    with pytest.raises(UserError, match=r"accelerate.Accelerator first, not a LlamaForCausalLM"):
        OptimizerSteps(model, model)
    steps = OptimizerSteps(accelerate.Accelerator(cpu=True), model)
    with pytest.raises(RuntimeError, match="stop here"), steps:
        raise RuntimeError("stop here")
    assert steps.step == 0
    assert not any(module.cache.active for module in model.modules() if isinstance(module, Linear))


def test_a_missing_library_is_named(monkeypatch):
    importlib.import_module("dither.integrations.transformers")
    monkeypatch.setitem(sys.modules, "accelerate", None)
    monkeypatch.delitem(sys.modules, "dither.integrations.transformers")
    with pytest.raises(UserError, match=r"dither\[hf\]"):
        import dither.integrations.transformers  # noqa: F401


# Several ranks -------------------------------------------------------------------------------------------------------------


@pytest.mark.exhaustive
def test_two_ranks_resume_bit_for_bit(tmp_path):
    program = Path(__file__).parent / "trainer_ranks.py"
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=2",
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=localhost:0",
    ]
    done = subprocess.run([*launch, program, tmp_path], capture_output=True, text=True, cwd=tmp_path, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads(done.stdout.splitlines()[-1])
    assert (results["kind"], results["ranks"], results["different"]) == ("MULTI_CPU", 2, [])


# The loss in parts -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True])
def test_the_loss_in_parts_is_that_of_transformers(tied: bool) -> None:
    """Shifted labels, ignored ones and a padding mask; gradients of the output layer and the embedding are released."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        max_position_embeddings=32, tie_word_embeddings=tied, bos_token_id=0, eos_token_id=1, pad_token_id=2,
    )  # fmt: skip
    labels, mask = IDS[:4].clone(), torch.ones_like(IDS[:4])
    labels[0, :3], labels[2, 4], mask[3, 6:], labels[3, 6:] = -100, -100, 0, -100
    found = []
    for rows in (None, 5):
        model = transformers.LlamaForCausalLM(config)
        model.load_state_dict({name: tensor.clone() for name, tensor in (found[0][0] if found else model).state_dict().items()})
        started = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        if rows is None:
            loss = model(input_ids=IDS[:4], attention_mask=mask, labels=labels).loss
        else:
            loss = dither.models.causal_loss(model, IDS[:4], labels, rows=rows, attention_mask=mask)
        loss.backward()
        found.append((model, started, loss.detach(), {name: p.grad for name, p in model.named_parameters()}))
    torch.testing.assert_close(found[1][2], found[0][2], rtol=1e-6, atol=0)
    for name, gradient in found[0][3].items():
        torch.testing.assert_close(found[1][3][name], gradient, rtol=1e-5, atol=1e-7)

    model = found[1][0]
    model.zero_grad()
    optimizer = optimizer_of(model, nonfinite="skip")
    dither.optim.release_gradients(model, optimizer)
    dither.models.causal_loss(model, IDS[:4], labels, rows=5, attention_mask=mask).backward()
    optimizer.step()
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not torch.equal(model.lm_head.weight, found[1][1]["lm_head.weight"])


def test_logits_that_are_capped_are_refused() -> None:
    config = transformers.Gemma2Config(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        head_dim=16, max_position_embeddings=32, final_logit_softcapping=0.01,
    )  # fmt: skip
    model = transformers.Gemma2ForCausalLM(config)
    with pytest.raises(UserError, match="Gemma2ForCausalLM changes the logits of its output layer"):
        dither.models.causal_loss(model, IDS[:2], IDS[:2])
