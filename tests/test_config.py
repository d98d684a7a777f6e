"""Configurations: TOML both ways, exactly; mistakes are one sentence with the key; schedules are what they say."""

import dataclasses
import itertools
import math
import typing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sweeps import examples

from dither import BitwidthLoss, Plan, Sampling, UserError, WeightDecay, cli, recipe
from dither.data import corpus
from dither.models.sizes import Model
from dither.optim import MODES
from dither.settings import toml, types_of, value_at
from dither.train import trainer as trainers
from dither.train.config import (
    Config,
    Data,
    Optim,
    Policy,
    Precision,
    RunSettings,
    describe,
    dumps,
    load,
    loads,
    override,
    schedule,
)
from dither.train.resume import fixed_changes

# Round trips ----------------------------------------------------------------------------------------------------------

positive = st.floats(1e-12, 1e12)
seeds = st.integers(0, 2**64 - 1)
letters = st.characters(exclude_categories=["Cs"])
texts = st.text(letters, min_size=1)


@st.composite
def anything(draw) -> Config:
    lr = draw(positive)
    micro = draw(st.none() | st.integers(1, 64))
    warmup, schedule = draw(st.floats(0, 1)), draw(st.sampled_from(["cosine", "wsd", "constant"]))
    b_init = draw(st.floats(0, 32))
    guides = [st.just(()), st.builds(WeightDecay, positive), st.builds(BitwidthLoss, positive)]
    both = st.tuples(st.builds(WeightDecay, positive), st.builds(BitwidthLoss, positive))
    sampling = st.builds(
        Sampling,
        noise=st.sampled_from(["rounded_normal", "uniform", "none"]),
        block=st.sampled_from([8, 16, 32]),
        b_init=st.just(b_init),
        b_target=st.floats(0, b_init),
        parts=st.sampled_from(["all", "od", "*up"]),
        recompute=st.booleans(),
        guidance=st.one_of(*guides, both),
    )
    model = draw(st.sampled_from([{}, {"preset": "tiny"}, {"hf": draw(texts)}]))
    return Config(
        model=Model(**model, vocab=draw(st.none() | st.integers(2, 10**6))),
        data=Data(
            sources=tuple(draw(st.lists(texts, max_size=3))),
            tokenizer=draw(texts),
            sequence=draw(st.integers(1, 10**6)),
            batch=(micro or 1) * draw(st.integers(1, 100)),
            micro_batch=micro,
            held_out=draw(st.floats(0, 1, exclude_min=True, exclude_max=True)),
            seed=draw(seeds),
        ),
        optim=Optim(
            optimizer=draw(st.sampled_from(["adamw", "adam-mini", "muon"])),
            lr=lr,
            min_lr=draw(st.floats(0, lr)),
            betas=(draw(st.floats(0, 1, exclude_max=True)), draw(st.floats(0, 1, exclude_max=True))),
            weight_decay=draw(st.floats(0, 1e300)),
            schedule=schedule,
            warmup=warmup,
            decay=draw(st.floats(0, 1 - warmup)) if schedule == "wsd" else 0.2,
        ),
        precision=Precision(
            **draw(st.sampled_from([{}, {"recipe": "fp8-block"}, {"plan": "plan.json"}])), sampling=draw(st.none() | sampling)
        ),
        guard=Policy(spike=draw(st.sampled_from(["warn", "rollback"])), spike_factor=draw(st.floats(1.01, 100))),
        run=RunSettings(steps=draw(st.integers(1, 2**31 - 1)), seed=draw(seeds), compile=draw(st.booleans()), device="cuda:1"),
    )


@settings(deadline=None, max_examples=examples(150), derandomize=True)
@given(anything(), st.booleans())
def test_what_is_written_is_read_again(config, comments):
    text = dumps(config, comments=comments)
    assert loads(text) == config
    assert dumps(loads(text), comments=comments) == text
    assert override(config, []) == config


def test_files(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(dumps(Config(run=RunSettings(out="übung/1 \x7f\t"))), encoding="utf-8")
    assert load(path).run.out == "übung/1 \x7f\t"
    assert loads("") == Config()


def test_integers_are_numbers_too():
    assert loads("[optim]\nlr = 1\nbetas = [0, 0.5]").optim == Optim(lr=1.0, betas=(0.0, 0.5))
    assert type(loads("[optim]\nlr = 1").optim.lr) is float


# Documentation --------------------------------------------------------------------------------------------------------


def test_every_field_has_a_sentence_a_type_and_its_default():
    found = {each.path: each for each in describe()}
    classes = {f"{each.name}.": typing.get_type_hints(Config)[each.name] for each in dataclasses.fields(Config)}
    classes["precision.sampling."] = Sampling
    expected = {prefix + each.name for prefix, cls in classes.items() for each in dataclasses.fields(cls)}
    assert set(found) == expected - {"precision.sampling"}
    assert all(each.sentence.endswith(".") and each.type for each in found.values())
    eps = "Added to the square root of the second moment."
    assert found["optim.eps"] == ("optim.eps", "float", 1e-8, eps)
    assert found["optim.schedule"].type == "cosine | wsd | constant"
    assert f"# {eps}\neps = 1e-08\n" in dumps(Config(), comments=True)


def test_what_may_be_absent_is_absent_by_default():
    # TOML has no null: a field that is None is left out, so it must be None where it is left out.
    for each in describe():
        section, _, name = each.path.rpartition(".")
        cls = Sampling if section == "precision.sampling" else types_of(Config)[section]
        if type(None) in typing.get_args(types_of(cls)[name]):
            assert each.default is None, each.path


def test_sentences_name_what_can_be_chosen():
    mode = next(each.sentence for each in describe() if each.path == "precision.mode")
    assert all(name in mode for name in MODES)


# Overrides ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "path", "value"),
    [
        ("optim.lr=3e-4", "optim.lr", 3e-4),
        ("optim.betas=[0.5, 0.6]", "optim.betas", (0.5, 0.6)),
        ("optim.optimizer=adam-mini", "optim.optimizer", "adam-mini"),
        ("precision.sampling.parts=od", "precision.sampling.parts", "od"),
        ("run.compile=true", "run.compile", True),
        ("run.out=runs/a=b", "run.out", "runs/a=b"),
        ("run.out=5", "run.out", "5"),
        ("run.out=a folder, [new]", "run.out", "a folder, [new]"),
        ("run.sample_prompt=", "run.sample_prompt", ""),
        ("data.sources=5", "data.sources", ("5",)),
        ("run.eval_every=1_000", "run.eval_every", 1000),
        ("data.sources=['a.txt', 'b.txt']", "data.sources", ("a.txt", "b.txt")),
        ('precision.sampling={parts="od", b_init=7, b_target=5}', "precision.sampling.b_init", 7.0),
    ],
)
def test_override(setting, path, value):
    assert value_at(override(Config(), [setting]), path) == value


def test_a_refused_setting_is_told_with_the_others_only_if_it_is_not_named():
    with pytest.raises(UserError, match=r"^optim\.lr is a number above 0, not -1\.$"):
        override(Config(), ["run.steps=5", "optim.lr=-1"])
    with pytest.raises(UserError, match=r"^After the settings 'model\.width=30, model\.heads=4': In \[model\]"):
        override(Config(), ["model.width=30", "model.heads=4"])


def test_overrides_are_checked_together_and_leave_the_rest():
    before = Config(data=Data(batch=8, micro_batch=4), precision=Precision(sampling=Sampling(b_init=8)))
    after = override(before, ["data.batch=9", "data.micro_batch=3", "precision.sampling.b_target=2"])
    assert after.data == Data(batch=9, micro_batch=3)
    assert after.precision.sampling == Sampling(b_init=8, b_target=2)
    assert before.data.batch == 8


# Mistakes -------------------------------------------------------------------------------------------------------------

MISTAKES = [
    ("optim = 3", r"\[optim\] is a section"),
    ("[optimizer]\nlr = 1", r"no section 'optimizer' \(did you mean 'optim'\?\)"),
    ("[optim]\nweigth_decay = 1", r"no key 'weigth_decay' \(did you mean 'weight_decay'\?\)"),
    ('[optim]\n"l\\nr" = 1', r"no key 'l\\nr'"),
    ('[optim]\nlr = "fast"', "optim.lr is a finite number, not 'fast'"),
    ("[optim]\nlr = nan", "optim.lr is a finite number, not nan"),
    ("[optim]\nlr = 0", "optim.lr is a number above 0, not 0"),
    ("[optim]\nlr = " + "9" * 400, "optim.lr is a finite number"),
    ("[optim]\nlr = " + "9" * 5000, "not TOML"),
    ("[optim]\nlr = 1979-05-27", "optim.lr is a finite number"),
    ("[optim]\nlr = 1999-99-99", "not TOML"),
    ("[optim]\nlr = 1\nlr = 2", "not TOML"),
    ("[optim]\nmin_lr = 1", "optim.min_lr is a number of at least 0 and at most 0.003"),
    ("[optim]\nbetas = [0.9]", "optim.betas is a list of two numbers"),
    ("[optim]\nbetas = [0.9, 1.0]", "Each of optim.betas is a number of at least 0 and below 1"),
    ("[optim]\nschedule = 'cosin'", r"optim.schedule is one of .*did you mean 'cosine'"),
    ("[optim]\nschedule = 'wsd'\nwarmup = 0.5\ndecay = 0.6", "add up to"),
    ("[optim]\nwarmup = 100", "optim.warmup is a number of at least 0 and at most 1"),
    ("[optim]\noptimizer = 'sgd'", "optim.optimizer is one of adamw, adam-mini, muon"),
    ("[muon]\nmomentum = 0.9", "muon.momentum=0.9 has no effect without optim.optimizer='muon'"),
    ("[optim]\noptimizer = 'muon'\n[muon]\nmomentum = 1.0", "muon.momentum is a number of at least 0 and below 1, not 1"),
    ("[optim]\noptimizer = 'muon'\n[muon]\nmatrix_lr = 0.0", "muon.matrix_lr is a number above 0"),
    ("[optim]\noptimizer = 'muon'\n[parallel]\npp = 2", "optim.optimizer='muon' does not go with parallel.pp=2"),
    (
        "[optim]\noptimizer = 'muon'\n[precision]\nmode = 'o2-split'",
        "second moments, which optim.optimizer='muon' does not have",
    ),
    (
        "[optim]\noptimizer = 'muon'\n[snip]\ntarget = 0.5\n[parallel]\ntp = 2\n[precision]\nrecipe = 'fp8-block'",
        "optim.optimizer='muon' does not go with snip.target and sharded weights",
    ),
    ("[model]\npreset = 'lama-1b'", r"no model.preset='lama-1b' \(did you mean 'llama-1b'\?\)"),
    ("[model]\npreset = 'tiny'\nhf = 'x'", "two models"),
    ("[model]\nvocab = 1", "model.vocab is an integer of at least 2"),
    ("[model]\nhf = ''", "model.hf"),
    ("[data]\nsources = 'a.txt'", "data.sources is a list of texts"),
    ("[data]\nsources = ['']", "is empty"),
    ("[data]\nbatch = 8.0", "data.batch is an integer"),
    ("[data]\nbatch = 8\nmicro_batch = 3", "data.micro_batch=3 does not divide"),
    ("[data]\nheld_out = 1", "data.held_out is a number above 0 and below 1"),
    ("[data]\nseed = 18446744073709551616", r"data.seed is an integer of at least 0 and below 2\^64"),
    ("[data]\nsequence = 0", "data.sequence is an integer of at least 1"),
    ("[precision]\nrecipe = 'fp8-blok'", "did you mean 'fp8-block'"),
    ("[precision]\nmode = 'o3'", "no precision.mode='o3'"),
    ("[precision]\nmode = 'fp32'\nrecipe = 'bf16'", "use the mode 'o1'"),
    ("[precision]\nmode = 'o2'\nrecipe = 'bf16-pure'", "use the mode 'bf16-rn' or 'bf16-sr' or 'bf16-kahan'"),
    ("[precision]\nrecipe = 'fp8-block'\nplan = 'x'", "both set the casts"),
    ("[precision]\nstates = 'e9m9'", "no precision.states='e9m9'"),
    (
        "[precision]\nweights = 'fp8'\nmode = 'o1'\nrecipe = 'fp8-current'",
        "precision.mode='o1' keeps weights of its own: use the mode",
    ),
    ("[precision]\nweights = 'fp8'\nmode = 'bf16-sr'\nrecipe = 'mxfp8'", "recipe is 'mxfp8': choose one of fp8-current, "),
    ("[precision]\nweights = 'fp8'\nmode = 'bf16-sr'", "needs a recipe that casts weights to e4m3"),
    (
        "[precision]\nweights = 'fp8'\nmode = 'bf16-sr'\nrecipe = 'fp8-current'\noutput = 'fp8-current'",
        "precision.output is set",
    ),
    ("[precision]\nlogits = 'chunked'\noutput = 'fp8-current'", "precision.output='fp8-current' casts it: drop one"),
    ("[precision]\ngradients = 'fp8'", "no precision.gradients='fp8'.*choose from fp32, bf16, bf16-sr"),
    ("[loss_scaling]\ninit_scale = 1e9", "loss_scaling.init_scale=1e[+]09 is above loss_scaling.max_scale"),
    ("[loss_scaling]\nbackoff_factor = 2", "loss_scaling.backoff_factor is a number above 0 and below 1"),
    ("[loss_scaling]\ninitial_scale = 2", r"\[loss_scaling\] has no key 'initial_scale'"),
    ("[precision]\nstates = 'dynamic8'\n[optim]\noptimizer = 'adam-mini'", "adam-mini"),
    ("[precision]\nmode = 'o2'\n[optim]\nerror_feedback = true", "optim.error_feedback=true.*use the mode bf16-sr or bf16-rn"),
    (
        "[precision]\nmode = 'bf16-sr'\nstates = 'dynamic4'\n[optim]\nerror_feedback = true",
        "'dynamic4' are rounded",
    ),
    ("[precision]\nmode = 'bf16-sr'\n[optim]\nerror_feedback = true\noptimizer = 'muon'", "optim.optimizer='muon' are set"),
    ("[precision]\nsampling = 1", r"\[precision.sampling\] is a section"),
    ("[precision.sampling]\nnois = 'uniform'", "did you mean 'noise'"),
    ("[precision.sampling]\nnoise = 'pink'", r"In \[precision.sampling\]: sampling.noise is one of"),
    ("[precision.sampling]\nb_init = 1", "exchange them"),
    ("[precision.sampling]\nguidance = [{kind = 'weight_decay', rat = 1}]", r"In \[precision.sampling\]"),
    ("[precision]\nschedule = 'fp8-block'", r"precision.schedule is a list of \[step or share, recipe\]"),
    ("[precision]\nschedule = [[0, 'fp8-blok']]", r"In precision.schedule: There is no recipe 'fp8-blok' \(did you mean"),
    ("[precision]\nschedule = [[1, 'fp8-block']]", "In precision.schedule: The first entry of a schedule begins at 0"),
    ("[precision]\nschedule = [[0, 'fp8-block'], [9, 'fp32'], [3, 'fp4-block']]", "In precision.schedule: .* ascend"),
    ("[precision]\nschedule = [[0, 'fp8-block'], [1.5, 'fp32']]", "a float from 0.0 to 1.0, not at 1.5"),
    ("[precision]\nschedule = [[0, 'fp8-block'], [500, 'fp32']]", "begins at step 500, and the last of 500 steps is 499"),
    ("[precision]\nmode = 'fp32'\nschedule = [[0, 'fp8-block'], [0.5, 'bf16']]", "'bf16', which computes in bf16"),
    ("[precision]\nschedule = [[0, 'fp8-block forward']]", "The first entry of precision.schedule sets all products"),
    ("[precision]\nrecipe = 'fp4-block'\nschedule = [[0, 'fp8-block']]", "precision.recipe='fp4-block' and precision.schedule"),
    ("[precision]\nplan = 'a.json'\nschedule = [[0, 'fp8-block']]", "precision.plan='a.json' and precision.schedule"),
    ("[precision]\nschedule = [[0, 'fp32']]\n[snip]\ntarget = 0.5", "SNIP chooses plans while an entry of precision.schedule"),
    ("[precision]\nschedule = [[0, 'fp8-block'], [105, 'fp8-row forward']]\n[snip]\ntarget = 0.5", "with snip.start=100"),
    ("[precision]\nmode = 'fp32'\nrecipe = 'fp8-auto'", "fp8-auto compares FP8 with BF16, and precision.mode='fp32'"),
    ("[snip]\ntarget = 0.5\nhorizon = 9", "snip.horizon=9 has no effect without snip.probe='sampling'"),
    ("[precision]\ntimes = 'times.json'", "precision.times='times.json' has no effect without the recipe fp8-auto"),
    ("[guard]\nspike = 'explode'", "guard.spike is one of"),
    ("[guard]\nspike_factor = 1", "guard.spike_factor is a number above 1"),
    ("[guard]\nspike_window = 3", "do not fit"),
    ("[guard]\nskip_share = 2", "guard.skip_share is a number of at least 0 and at most 1"),
    ("[run]\nsteps = 2147483648", r"run.steps is an integer of at least 1 and below 2\^31"),
    ("[run]\nsteps = " + "9" * 4000, "run.steps is an integer of at least 1 and below"),
    ("[run]\ncompile = 1", "run.compile is true or false"),
    ("[run]\ndevice = 'tpu'", "run.device is auto, cpu, cuda"),
    ('[run]\nout = "a\\u0000b"', "run.out is the path"),
    ("[run]\nkeep_last = 0", "run.keep_last is an integer of at least 1"),
    ("[run]\n__class__ = 'x'", "no key '__class__'"),
    ("[run]\nout = " + "[" * 5000 + "]" * 5000, "TOML"),
    ("a" * 100000, "not TOML"),
    ("\0", "not TOML"),
    ("[run]\nout = '''\n", "not TOML"),
]


@pytest.mark.parametrize(("text", "message"), MISTAKES, ids=range(len(MISTAKES)))
def test_mistakes_are_one_sentence(text, message, tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(text)
    with pytest.raises(UserError, match=message) as caught:
        load(path)
    said = str(caught.value)
    assert said.startswith(f"In the config {str(path)!r}: ")
    assert said.endswith(".")
    assert "\n" not in said
    assert len(said) < 900


@pytest.mark.parametrize("data", [b"\xff\xfe", b"[run]\nout = '\xc3'"])
def test_files_that_are_not_text(data, tmp_path):
    (tmp_path / "run.toml").write_bytes(data)
    with pytest.raises(UserError, match="cannot be read"):
        load(tmp_path / "run.toml")
    with pytest.raises(UserError, match="cannot be read"):
        load(tmp_path)
    for name in (tmp_path / "none.toml", "a\0b"):
        with pytest.raises(UserError, match=r"There is no config .*: name a TOML file"):
            load(name)


@pytest.mark.parametrize(
    "setting",
    [
        "",
        "optim.lr",
        "optim..lr=1",
        "optim.lr=",
        "optim.lr=1\nrun.steps=2",
        "optim.lr=1 2",
        "optim.lr=__import__('os')",
        "optim.lr.x=1",
        "optim.nothing=1",
        "nothing.lr=1",
        "optim.lr=fast",
        "precision.sampling.parts.x=1",
    ],
)
def test_wrong_settings(setting):
    with pytest.raises(UserError) as caught:
        override(Config(), [setting])
    assert "\n" not in str(caught.value)


@settings(deadline=None, max_examples=examples(300), derandomize=True)
@given(st.text(st.sampled_from("[]{}=.\"'#\n\\ optimlrun_e-09:,\0"), max_size=60))
def test_noise_is_a_config_or_a_sentence(text):
    for read in (loads, lambda text: override(Config(), [text])):
        try:
            assert isinstance(read(text), Config)
        except UserError as error:
            assert "\n" not in str(error)  # noqa: PT017


def test_sections_are_checked_where_they_are_made():
    with pytest.raises(UserError, match=r"optim.lr is a number above 0, not -1\."):
        Optim(lr=-1)
    with pytest.raises(UserError, match=r"config\.optim is of type Optim, not 3"):
        Config(optim=3)
    with pytest.raises(UserError, match=r"run\.out is a text in quotes"):
        RunSettings(out="\ud800")
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().optim.lr = 1


# Meaning --------------------------------------------------------------------------------------------------------------


def test_plans(tmp_path):
    assert Precision(recipe="fp8-block").load_plan() == recipe("fp8-block")
    assert Precision(mode="bf16-sr").load_plan() == recipe("bf16-pure")
    sampled = Precision(mode="o1", sampling=Sampling(parts="od")).load_plan()
    assert sampled == recipe("bf16").with_sampling(Sampling(parts="od"))
    recipe("mxfp4").save(tmp_path / "plan.json")
    assert Precision(plan=str(tmp_path / "plan.json")).load_plan() == recipe("mxfp4")
    Plan(parameters="bf16").save(tmp_path / "plan.json")
    with pytest.raises(UserError, match=r"does not fit precision\.mode='fp32'"):
        Precision(mode="fp32", plan=str(tmp_path / "plan.json")).load_plan()
    with pytest.raises(UserError, match="cannot be read"):
        Precision(plan=str(tmp_path / "none.json")).load_plan()
    for name, mode in MODES.items():
        assert Precision(mode=name, recipe=mode.recipe).load_plan() == mode.plan


@pytest.mark.parametrize(
    ("fields", "on_gpu", "elsewhere"),
    [
        ({}, "o1", "fp32"),
        ({"recipe": "fp8-block"}, "o1", "fp32"),
        ({"recipe": "fp8-auto"}, "o1", "o1"),
        ({"recipe": "fp16"}, "fp16", "fp16"),
        ({"schedule": ((0, "fp8-block"), (0.5, "bf16"))}, "o1", "o1"),
        ({"mode": "bf16-sr"}, "bf16-sr", "bf16-sr"),
    ],
)
def test_the_mode_by_default_suits_the_device_and_the_casts(fields, on_gpu, elsewhere):
    precision = Precision(**fields)
    assert (precision.resolved(bf16=True).mode, precision.resolved(bf16=False).mode) == (on_gpu, elsewhere)


def test_plans_by_step():
    text = '[precision]\nmode = "o1"\nschedule = [[0, "blockwise"], [0.8, "fp8-row forward"], [499, "bf16"]]'
    config = loads(text)
    assert config.precision.schedule == ((0, "blockwise"), (0.8, "fp8-row forward"), (499, "bf16"))
    assert config.precision.beginnings(config.run.steps) == [0, 400, 499]
    assert config.precision.load_plan() == recipe("fp8-block")
    assert loads(dumps(config)) == config
    assert override(Config(), ["precision.mode=o1", f"precision.schedule={toml(config.precision.schedule)}"]) == config
    # The recipe says the same as the first entry.
    assert Precision(recipe="blockwise", schedule=((0, "fp8-block"),)).load_plan() == recipe("fp8-block")
    # What casts nothing is the mode's own plan, so that nothing else changes.
    late = Precision(mode="bf16-sr", schedule=((0, "fp8-block"), (1, "bf16"))).plan_of("bf16")
    assert late == dataclasses.replace(MODES["bf16-sr"].plan, provenance={"recipe": "bf16"})


def test_a_schedule_may_change_where_it_has_not_begun():
    def config(schedule, steps=500, **fields):
        precision = Precision(schedule=schedule, **fields)
        return Config(optim=Optim(schedule="constant", warmup=0.0), precision=precision, run=RunSettings(steps=steps))

    old = config(((0, "fp4-block"), (0.5, "fp8-block"), (0.9, "fp32")))
    later = config(((0, "fp4-block"), (250, "blockwise"), (300, "fp8-row")))
    assert fixed_changes(old, later, 300) == []
    assert "precision.schedule from" in fixed_changes(old, later, 301)[0]
    assert "precision.schedule from" in fixed_changes(old, config(((0, "fp4-fp8grad"),)), 0)[0]
    # Shares of a longer run lie elsewhere.
    longer = config(old.precision.schedule, 1000)
    assert fixed_changes(old, longer, 250) == []
    assert fixed_changes(old, longer, 251) == [
        "the steps of precision.schedule from fp4-block at 0, fp8-block at 250 to fp4-block at 0"
    ]


def test_schedules():
    def rates(**optim):
        config = Config(optim=Optim(lr=2.0, **optim), run=RunSettings(steps=200))
        return [schedule(config, step) for step in range(200)]

    warm = [2.0 * (step + 1) / 20 for step in range(20)]
    constant = rates(schedule="constant", warmup=0.1)
    assert constant == warm + [2.0] * 180
    cosine = rates(schedule="cosine", warmup=0.1, min_lr=0.5)
    assert cosine[:21] == [*warm, 2.0]
    assert cosine[110] == pytest.approx(1.25)  # half way between the ends
    assert cosine[199] == pytest.approx(0.5 + 1.5 * (1 - math.cos(math.pi / 180)) / 2)
    assert all(a > b for a, b in itertools.pairwise(cosine[20:]))
    wsd = rates(schedule="wsd", warmup=0.1, decay=0.25, min_lr=0.2)
    assert wsd[:151] == warm + [2.0] * 131
    assert wsd[151:] == pytest.approx([0.2 + 1.8 * (200 - step) / 50 for step in range(151, 200)])
    assert rates(schedule="wsd", warmup=0.0, decay=0.0) == [2.0] * 200
    assert rates(schedule="cosine", warmup=1.0)[-1] == 2.0
    assert rates(schedule="cosine") == rates(schedule="cosine", min_lr=0.2)
    for step in (-1, 200, 1.0, True):
        with pytest.raises(UserError, match="are 0 to 199"):
            schedule(Config(run=RunSettings(steps=200)), step)


# Goals that no plan can reach are refused before the model is built, and in a loop of one's own when Snip is made ------


IMPOSSIBLE = {
    "snip.pinned=['*.nothing=fp8-block']": "matches no layer",
    "snip.pinned=['*=fp8-block']": "the largest feasible one is 0",
    "snip.options='bf16,fp8-block' snip.target=0.9 snip.pinned=['*.down_proj=bf16']": "the largest feasible one is",
}


@pytest.mark.parametrize("settings", IMPOSSIBLE)
def test_an_impossible_goal_is_an_error_before_the_model_is_built(settings, tmp_path, monkeypatch, capsys):
    for module, name in ((trainers, "_model"), (corpus, "prepare"), (corpus, "open_tokens")):
        monkeypatch.setattr(module, name, lambda *_, **__: pytest.fail("too late"))
    words = ["snip.target=0.5", "precision.recipe=fp8-block", *settings.split()]
    assert cli.main(["train", "--out", str(tmp_path / "run"), "--set", *words]) == 2
    said = capsys.readouterr().err
    assert said.startswith("dither: error: In [snip]: ")
    assert IMPOSSIBLE[settings] in said
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("setting", "needed"),
    [
        ("lora.alpha=3", "lora.rank"),
        ("snip.start=3", "snip.target"),
        ("loss_scaling.init_scale=3", "precision.mode='fp16'"),
        ("optim.decay=0.5", "optim.schedule='wsd'"),
        ("monitor.tokens=7", "monitor.every"),
        ("guard.most_skips=7", "guard.nonfinite='skip'"),
        ("guard.overflow_share=0.5", "precision.mode='fp16'"),
        ("guard.most_rollbacks=7", "guard.spike='rollback'"),
    ],
)
def test_a_setting_without_effect_is_refused(setting, needed):
    with pytest.raises(UserError, match=f"{setting.partition('=')[0]}=.* has no effect without {needed}: "):
        override(Config(), [setting])
    assert loads(dumps(Config())) == Config()  # which writes every field, at its default


def test_settings_with_their_parent_have_an_effect():
    changes = "optim.schedule=wsd optim.decay=0.5 snip.target=0.5 snip.start=3 precision.mode=fp16 loss_scaling.init_scale=3.0"
    assert override(Config(), changes.split()).loss_scaling.init_scale == 3
