"""`dither export`: write a trained model for transformers, vLLM or llama.cpp."""

import shlex
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Literal

import tyro

from dither.commands.arguments import Device, Json, ModelPath, Tokenizer
from dither.console import ProgressBars, print_result
from dither.errors import UserError
from dither.spec import Plan
from dither.spec.deployment import DEPLOYMENTS


def export(
    model: ModelPath,
    /,
    out: Annotated[Path | None, tyro.conf.arg(aliases=["-o"], metavar="FOLDER", help_behavior_hint="")] = None,
    format: Annotated[str | None, tyro.conf.arg(metavar="FORMAT", help_behavior_hint="")] = None,
    plan: Annotated[Path | None, tyro.conf.arg(metavar="PLAN.json")] = None,
    tokenizer: Tokenizer = None,
    data: Annotated[tuple[str, ...], tyro.conf.arg(metavar="SOURCE...")] = (),
    sequence: int | None = None,
    sequences: int = 64,
    engine: Literal["any", "vllm"] = "any",
    merge: bool = False,
    check: bool = False,
    max_shard_size: Annotated[str, tyro.conf.arg(metavar="SIZE")] = "5GB",
    slack: float = 0.05,
    device: Device = "cpu",
    json: Json = False,
) -> int:
    """Write a trained model for transformers, vLLM or llama.cpp.

    The folder has the weights, the config, the tokenizer and a model card, and appears complete or not at all. Layers whose
    sizes do not fit the format stay in BF16; they are listed. Weights are cast from float32 masters where the run has them.

    Args:
        out: The folder to write, new or empty; with a GGUF format the file to write.
        format: bf16, fp16, fp8-block, fp8-dynamic, mxfp8, mxfp4, mxfp4-w4a4, nvfp4, int8, int4-g32, int4-g128; auto, by
            learned bitwidths or by a plan; or gguf-f16, gguf-q8_0, gguf-q4_0, gguf-mxfp4. By default that of
            `dither train --qat`, whose codes are written, or else bf16.
        plan: With auto: the plan whose casts of weights choose the formats; by default that of the run.
        data: Text for the loss before and after the cast; by default the held-out text of the run.
        sequence: Tokens per sequence of that text; by default as in training, or 1024.
        sequences: Most sequences, evenly spaced over the text; 0 means all.
        engine: vllm also writes experts of mixtures in formats that transformers does not read.
        merge: Of a run that trained adapters, write the whole model, with the adapters added to the numbers of the base's
            codes. A format that loses more than a tenth of what they learned, in held-out loss, is refused.
            Without it, the adapters alone are written, as a folder for PEFT.
        check: Load the result with transformers and compare weights and logits before it appears.
        max_shard_size: Most bytes per file of weights, such as 500MB.
        slack: With auto: bits by which a learned bitwidth may exceed the capacity of a format.
    """
    from dither.evaluate.deployment import SLACK
    from dither.evaluate.variants import check_lengths
    from dither.exporting import folder
    from dither.exporting.adapters import export_adapters
    from dither.exporting.formats import AUTO, DENSE, GGUF_NAMES, check_format
    from dither.exporting.record import require
    from dither.exporting.sources import deployment_plan, opened
    from dither.models.lora import merged_model

    check_format("bf16" if format is None else format)
    if out is None:
        raise UserError("Name the folder to write with -o, such as -o exported.")
    if plan is not None and format != AUTO:
        raise UserError(f"--plan chooses the formats of layers, and --format {format} is one for all: use --format auto.")
    if slack != SLACK and (format != AUTO or plan is not None):
        raise UserError(f"--slack {slack} is about learned bitwidths: it needs --format auto without --plan.")
    check_lengths(sequence, sequences)
    if format is not None:
        folder.check_target(out, format)
    if format in GGUF_NAMES:
        require("gguf", f"--format {format}")
    if check:
        require("transformers", "--check")
    bars = ProgressBars(sys.stderr)
    with ExitStack() as stack:
        with bars.stage(f"Reading {model}"):
            source = stack.enter_context(opened(model, tokenizer=tokenizer, data=data, device=device))
        for note in source.notes:
            print(note, file=sys.stderr)
        if source.adapted is None and merge:
            raise UserError(f"--merge is for runs that trained adapters, and {str(model)!r} has none: leave it out.")
        adapts = source.adapted is not None and not merge
        if format is None or (format == AUTO and plan is None and not adapts):
            format = ("bf16" if adapts else source.qat) or format or "bf16"
            folder.check_target(out, format)
        words = ["dither", "export", str(model), "-o", str(out), "--format", format]
        words += [] if plan is None else ["--plan", str(plan)]
        words += [] if tokenizer is None else ["--tokenizer", tokenizer]
        words += ["--data", *data] if data else []
        words += ["--merge"] if merge else []
        words += ["--engine", engine] if engine != "any" else []
        words += ["--slack", str(slack)] if slack != SLACK else []
        command = shlex.join(words)
        if source.adapted is not None and source.lora is not None and not merge:
            if format != "bf16" or plan is not None:
                raise UserError("Adapters are written as they are: --format and --plan need --merge.")
            facts = {"command": command, **source.provenance}
            files = source.tokenizer_files
            with bars.stage("Writing adapters"):
                adapters = export_adapters(
                    source.adapted, source.lora, out, base=source.base, tokenizer=files, check=check, provenance=facts
                )
            print_result({**vars(adapters), "path": out}, lambda: print(adapters), json=json)
            return 0
        evaluate, loss_base = source.evaluator(sequence, sequences, bars.stage), None
        if source.adapted is not None and format not in DENSE:
            if evaluate is None:
                raise UserError(
                    f"--merge with --format {format} needs text, to see that the cast keeps what the adapters learned: name it "
                    "with --data, or use --format bf16."
                )
            loss_base = evaluate(merged_model(source.adapted, adapters=False))
        chosen = source.plan if source.qat == format else None
        written = DEPLOYMENTS.get(format)
        if source.qat and format != AUTO and not (written and written.stores(DEPLOYMENTS[source.qat].cast)):
            worse = "it may be worse than one that trained for no format (docs/qat.md)"
            print(f"The model trained for {source.qat}. Written as {format}, {worse}.", file=sys.stderr)
        if format == AUTO:
            chosen = Plan.load(plan) if plan is not None else deployment_plan(source, slack)
        record = folder.export(
            source.model,
            out,
            format=format,
            plan=chosen,
            tokenizer=source.tokenizer_files,
            engine=engine,
            evaluate=evaluate,
            loss_base=loss_base,
            check=check,
            max_shard_size=max_shard_size,
            provenance={"command": command, **source.provenance},
            stage=bars.stage,
        )
    print_result(record, lambda: print(record), json=json)
    return 0
