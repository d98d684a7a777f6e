"""TRL's SFTTrainer as it is: with a converted model, with DitherCallback, and with PEFT."""

import json

import pytest
import torch
from lazily import Lazy

import dither
from dither.data import train_bpe
from dither.nn import FrozenLinear, freeze_base
from dither.nn.sites import converted_layers

trl = Lazy("trl")
datasets, peft, transformers = Lazy("datasets"), Lazy("peft"), Lazy("transformers")
integration = Lazy("dither.integrations.transformers")

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.filterwarnings("error::UserWarning:dither")]

SIZE = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
ROWS = [{"prompt": f"{a} + {b} =", "completion": f" {a + b}"} for a in range(6) for b in range(4)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    place = tmp_path_factory.mktemp("tokenizer")
    (place / "tokenizer.json").write_text(train_bpe([json.dumps(ROWS)], 280).json)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"}
    (place / "tokenizer_config.json").write_text(json.dumps(settings))
    return transformers.AutoTokenizer.from_pretrained(place)


def llama():
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZE))


def arguments(folder, steps=4, **options):
    options = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "logging_steps": 1} | options
    options |= {"max_length": 32, "report_to": "none", "use_cpu": True, "bf16": False, "learning_rate": 1e-2}
    options |= {"save_strategy": "steps", "save_steps": 2, "seed": 0, "lr_scheduler_type": "constant", "disable_tqdm": True}
    return trl.SFTConfig(output_dir=str(folder), max_steps=steps, gradient_checkpointing=False, **options)


def losses(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def sft(model, folder, tokenizer, *, steps=4, kind=None, **options):
    data = datasets.Dataset.from_list(ROWS)
    options = {"model": model, "args": arguments(folder, steps), "train_dataset": data, "processing_class": tokenizer} | options
    return (kind or trl.SFTTrainer)(**options)


@pytest.mark.exhaustive
def test_sft_trainer_trains_and_resumes_a_converted_model(tokenizer, tmp_path):
    results = []
    for folder, resume in (("straight", False), ("halves", True)):
        model = llama()
        dither.convert(model, "fp8-block")
        trainer = sft(model, tmp_path / folder, tokenizer, steps=2 if resume else 4, callbacks=[integration.DitherCallback()])
        trainer.train()
        if resume:
            model = llama()
            dither.convert(model, "fp8-block")
            trainer = sft(model, tmp_path / folder, tokenizer, callbacks=[integration.DitherCallback()])
            trainer.train(resume_from_checkpoint=True)
        results.append((losses(trainer)[-1], {name: tensor.clone() for name, tensor in model.state_dict().items()}))
    assert losses(trainer)[-1] < 6
    assert results[0][0] == results[1][0]
    assert all(torch.equal(results[0][1][name], results[1][1][name]) for name in results[0][1])
    assert (tmp_path / "halves" / "checkpoint-4" / "dither_state.safetensors").is_file()


def test_sft_trainer_as_a_dither_trainer(tokenizer, tmp_path):
    class Tuner(integration.DitherTrainer, trl.SFTTrainer):
        pass

    model = llama()
    dither.convert(model, "fp8-block")
    trainer = sft(model, tmp_path, tokenizer, kind=Tuner)
    trainer.train()
    found = losses(trainer)
    assert found[-1] < found[0]
    assert trainer.state.log_history[0]["dither/weights_e4m3"] == 1.0


@pytest.mark.sampled(without=["False"])
@pytest.mark.parametrize("codes", [False, True])
def test_sft_trainer_with_a_peft_config(codes, tokenizer, tmp_path):
    model = llama()
    dither.convert(model, "fp8-block")
    adapters = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    if codes:  # the base as codes: adapters first, since they freeze it
        model = peft.get_peft_model(model, adapters)
        assert len(freeze_base(model)) == 7
        trainer = sft(model, tmp_path, tokenizer, callbacks=[integration.DitherCallback()])
    else:
        trainer = sft(model, tmp_path, tokenizer, peft_config=adapters, callbacks=[integration.DitherCallback()])
    trainer.train()
    found = losses(trainer)
    assert found[-1] < found[0]
    layers = converted_layers(trainer.model)
    assert len(layers) == 7
    assert all(isinstance(layer, FrozenLinear) == codes for layer in layers.values())
    saved = tmp_path / "checkpoint-4"
    assert (saved / "adapter_model.safetensors").is_file()
    again = peft.PeftModel.from_pretrained(llama(), saved)
    ours = {name: tensor for name, tensor in trainer.model.state_dict().items() if "lora_" in name}
    theirs = again.state_dict()
    assert ours
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
