"""Plans: what is wrong is told with its line; a sweep is a table of plans; what a plan comes to."""

from dataclasses import replace
from pathlib import Path
from typing import get_type_hints

import msgspec
import pytest

from areal_async.config import Config, Section
from areal_async.config_types import description, options, struct_type
from areal_async.errors import ConfigError
from areal_async.messages import Rules
from areal_async.simulate import scenario as scenarios
from areal_async.simulate.fit import Fitted
from areal_async.simulate.models import Answer, Cluster, RewardModel, ServerModel, SwapModel, TrainerModel
from areal_async.simulate.plan import Plan
from areal_async.simulate.plan_file import Row, load_rows
from areal_async.simulate.scenario import Scenario, scenario
from areal_async.simulate.sweep import baselines, prepare

PLAN = """\
model: {name: r1-distill-qwen-1.5b}
gpu: {name: H800}
cluster: {gpus: 32}
rollout: {group_size: 16, max_new_tokens: 27648, when_older: train}
train:
  steps: 5
  batch_groups: 32
  max_tokens_per_microbatch: 32768
answers:
  mean_tokens: 6000
"""

RUN = Fitted(
    Rules(
        seed=7, steps=90, batch_groups=16, group_size=8, max_staleness=3, max_concurrent=64, minibatches=1, ranks=1,
        max_tokens_per_microbatch=512, max_new_tokens=48, servers=1, eval_every=10, min_group=8,
    ),
    Cluster(
        servers=1,
        server=ServerModel(0.01, 0.0, 1e-6, 1e-4, 1e-4, 64, 100_000),
        swap=SwapModel(0.1),
        trainer=TrainerModel(0.1, 0.01, 0.01, 1e-4, 0.0, 0.05),
        rewards=RewardModel(0.001, 1),
        answers=type("Same", (), {"answer": lambda self, group, member, attempt: Answer(9, 20, False, 1.0)})(),
    ),
)  # fmt: skip


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def write(text: str) -> str:
        Path("plan.yaml").write_text(text)
        return "plan.yaml"

    return write


def built(row: Row, fitted: Fitted | None = None) -> Scenario:
    return scenario(row.plan, row.sources, fitted)


def wrong(path: str, *overrides: str, fitted: Fitted = RUN) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        prepare(load_rows(path, overrides), lambda run: fitted)
    return str(caught.value).split("\n")


# ------------------------------------------------------------------------------------------------------------- options


def test_options_of_a_run_are_the_same_in_a_plan():
    """Name, limits and meaning; defaults but where a plan has a better one to offer (none: from the cluster)."""
    of_run, of_plan = (dict(options(struct_type(kind))) for kind in (Config, Plan))
    shared = [key for key in of_plan if key.partition(".")[0] in ("rollout", "train", "weights", "checkpoint")]
    assert len(shared) == 17
    for key in shared:
        if key in ("train.truncated", "rollout.max_concurrent", "weights.wave"):  # say more than the run's
            assert key in of_run
            continue
        assert description(of_plan[key]) == description(of_run[key]), key
        if not key.startswith(("train.steps", "train.batch_groups")):  # a run may give them
            assert of_plan[key].default == of_run[key].default, key


def test_every_option_has_a_description():
    assert [key for key, field in options(struct_type(Plan)) if not description(field)] == []


def test_every_option_is_read(monkeypatch):
    """None is a dead one: each is asked for by whoever makes something of a plan."""
    source = "".join(Path(module.__file__).read_text() for module in _readers())
    leaves = {key.rpartition(".")[2] for key, _ in options(struct_type(Plan))}
    assert [leaf for leaf in sorted(leaves) if f".{leaf}" not in source and f'"{leaf}"' not in source] == []


def _readers():
    from areal_async import cli_simulate
    from areal_async.simulate import plan_file, sweep

    return scenarios, plan_file, sweep, cli_simulate


def test_sections_forbid_unknown_fields():
    sections = [kind for kind in get_type_hints(Plan).values() if isinstance(kind, type) and issubclass(kind, Section)]
    assert len(sections) == 14


# ------------------------------------------------------------------------------------------------------- what is wrong


def test_all_that_is_wrong_is_told_at_once_with_its_line(write):
    text = PLAN.replace("steps: 5", "stepps: 5").replace("mean_tokens: 6000", "mean_tokens: -1") + (
        "sweep:\n  rollout.max_stalenes: [0, 4]\n  system: [async, sinc]\n  answers: {spread: [1, 4]}\n  title: [a]\n"
        "  rollout.max_concurrent: []\n  rollout: [1]\n"
    )
    assert wrong(write(text), "seed=x") == [
        "plan.yaml:6: train.stepps: no such key; did you mean train.steps?",
        "plan.yaml:10: answers.mean_tokens: must be a number > 0, or null, not the number -1",
        "plan.yaml:12: sweep.rollout.max_stalenes: no such key; did you mean rollout.max_staleness?",
        "plan.yaml:13: system: must be async, colocated or sync, not the text 'sinc'; did you mean sync?",
        "plan.yaml:14: answers.spread: must be a number ≥ 0 and ≤ 3, not the number 4; the nearest is 3",
        "plan.yaml:15: sweep.title: isn't of a row; it can't be swept",
        "plan.yaml:16: sweep.rollout.max_concurrent: has no values; leave it out",
        "plan.yaml:17: sweep.rollout: is a section; name one of its keys, such as rollout.group_size",
        "command line: seed: must be a whole number ≥ 0, not the text 'x'",
    ]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("train.minibatches=3", "3 does not divide train.batch_groups (32); try 2 or 4"),
        ("train.steps=null", "missing; write it, or name a run in from_run"),
        ("cluster.gpus=null", "servers.count: missing; write it, or cluster.gpus, whose rest it gets"),
        ("trainer.gpus=32", "servers.count: 0: there would be no server; give it some of the GPUs"),
        ("servers.gpus=5 trainer.gpus=8", "trainer.gpus: 8 of 32 GPUs leave no whole servers of 5"),
        ("cluster.gpus=4 trainer.gpus=3 servers.count=2", "cluster.gpus: 4, but servers.count × servers.gpus +"),
        ("system=colocated cluster.gpus=9 servers.gpus=2", "9 GPUs don't make whole servers of 2 and whole ranks of 1"),
        ("system=colocated failures.server_hours=1", "has no meaning with colocated"),
        ("trainer.gpus_per_rank=3", "trainer.gpus: 8 GPUs don't make whole ranks of trainer.gpus_per_rank (3)"),
        ("rollout.requeue=true", "nothing is dropped with rollout.when_older train"),
        ("trainer.fixed_microbatches=3", "does nothing with trainer.microbatches dynamic"),
        ("train.max_tokens_per_microbatch=20000", "doesn't hold the longest sample, of 27904 tokens; try 27904"),
        ("model.name=r1-distill-qwen-32b", "servers.gpus: the KV cache of 1 GPU(s) holds 24689 tokens"),
        ("model.parameters=233e6", "233,000,000 are not more than the input embedding alone (model.vocab"),
        ("gpu.name=null", "gpu.tflops: missing; write it, or gpu.name: A100, H100, H200, H800"),
        ("model.name=null", "missing; write it, or model.name: r1-distill-qwen-1.5b"),
        ("answers.mean_tokens=null", "answers.mean_tokens: missing; write it, or one of answers.median_tokens"),
        ("answers.lengths=[5]", "there is answers.mean_tokens already, and lengths have one distribution"),
        ("answers.measured_at=6000", "answers that were cut at 6000 tokens can't have 6000 in the mean"),
        ("answers.p95_tokens=600", "answers.median_tokens: missing: median_tokens and p95_tokens give"),
        ("weights.wave=25", "25 is more than there are servers (24); try 24"),
        ("rollout.max_concurrent=8", "8 is less than one group (rollout.group_size is 16); try 512"),
        ("warm_up=3", "3 and the last η + 1 of 5 steps leave none; try train.steps 9"),
    ],
)  # fmt: skip
def test_what_does_not_go_together(write, overrides, message):
    assert message in "\n".join(wrong(write(PLAN), *overrides.split()))


def test_files_that_are_no_plan(write):
    assert wrong("nowhere.yaml") == ["nowhere.yaml: can't be read: No such file or directory"]
    assert wrong(write("a: [")) == [
        "plan.yaml:1: not YAML: expected the node content, but found '<stream end>', while parsing a flow node"
    ]
    assert wrong(write(PLAN + "sweep: 3\n"))[0].startswith("plan.yaml:11: sweep: must be a section")


# ------------------------------------------------------------------------------------------------------------- a sweep


def test_a_grid_of_several_keys(write):
    text = PLAN + "sweep:\n  rollout.max_staleness: [0, 4]\n  train: {minibatches: [1, 2]}\n"
    rows = load_rows(write(text))
    assert [list(row.values.values()) for row in rows] == [["0", "1"], ["0", "2"], ["4", "1"], ["4", "2"]]
    assert [(row.plan.rollout.max_staleness, row.plan.train.minibatches) for row in rows] == [
        (0, 1), (0, 2), (4, 1), (4, 2)
    ]  # fmt: skip
    assert rows[2].plan.train.steps == 5


def test_grids_one_after_the_other(write):
    text = PLAN + "sweep:\n  - {system: sync, train.steps: 9}\n  - {system: async, cluster.gpus: [32, 64]}\n"
    rows = load_rows(write(text))
    assert [dict(row.values) for row in rows] == [
        {"system": "sync", "train.steps": "9"},
        {"system": "async", "cluster.gpus": "32"},
        {"system": "async", "cluster.gpus": "64"},
    ]
    assert [row.plan.train.steps for row in rows] == [9, 5, 5]


def test_the_command_line_sweeps_and_stops_sweeping(write):
    path = write(PLAN + "sweep:\n  rollout.max_staleness: [0, 4]\n")
    rows = load_rows(path, ["sweep.train.minibatches=[2,4]", "sweep.rollout.max_staleness=[1]"])
    assert [list(row.values.values()) for row in rows] == [["1", "2"], ["1", "4"]]
    (row,) = load_rows(path, ["rollout.max_staleness=7"])
    assert (dict(row.values), row.plan.rollout.max_staleness) == ({}, 7)


def test_a_sweep_has_an_end(write):
    text = PLAN + "sweep:\n" + "".join(
        f"  {key}: [{', '.join(map(str, range(1, 40)))}]\n" for key in ("seed", "warm_up", "train.steps")
    ).replace("warm_up", "servers.max_running")  # fmt: skip
    assert wrong(write(text)) == ["plan.yaml:11: sweep: has more than 1000 rows; leave some values out"]


def test_baselines(write):
    text = PLAN + "sweep:\n  cluster.gpus: [32, 64]\n  system: [async, sync]\n"
    path = write(text)
    assert baselines(load_rows(path)) == [0, 0, 0, 0]
    assert baselines(load_rows(path, ["baseline=[system=sync]"])) == [1, 1, 3, 3]
    assert baselines(load_rows(path, ["baseline=[system=sync,cluster.gpus=64]"])) == [3, 3, 3, 3]
    for given, message in (
        ("system=colocated", "is no value of the sweep; system is swept over async, sync"),
        ("seed=1", "is no value of the sweep; swept are cluster.gpus, system"),
    ):
        with pytest.raises(ConfigError, match="command line: baseline: ") as caught:
            baselines(load_rows(path, [f"baseline=[{given}]"]))
        assert message in str(caught.value)


# ------------------------------------------------------------------------------------------------- what a plan comes to


@pytest.mark.parametrize(
    ("overrides", "servers", "ranks", "gpus"),
    [
        ([], 24, 8, 32),
        (["cluster.rollout_share=0.5"], 16, 16, 32),
        (["cluster.rollout_share=0.99"], 31, 1, 32),
        (["trainer.gpus=4"], 28, 4, 32),
        (["servers.count=20"], 20, 12, 32),
        (["servers.gpus=2", "trainer.gpus_per_rank=4", "model.name=r1-distill-qwen-7b"], 12, 2, 32),
        (["cluster.gpus=null", "servers.count=3", "trainer.gpus=5"], 3, 5, 8),
        (["cluster.gpus=8", "servers.count=3", "trainer.gpus=5"], 3, 5, 8),
        (["system=colocated"], 32, 32, 32),
        (["system=colocated", "servers.gpus=2", "trainer.gpus_per_rank=4"], 16, 8, 32),
    ],
)
def test_gpus_are_split(write, overrides, servers, ranks, gpus):
    made = built(load_rows(write(PLAN), overrides)[0])
    assert (made.cluster.servers, made.rules.servers, made.rules.ranks, made.gpus) == (servers, servers, ranks, gpus)


def test_a_plan_without_a_run(write):
    made = built(load_rows(write(PLAN))[0])
    rules = made.rules
    assert (rules.batch_groups, rules.group_size, rules.max_staleness, rules.when_older) == (32, 16, 4, "train")
    assert (rules.max_concurrent, rules.wave, rules.min_group) == (24 * 256, 24, 16)
    assert built(load_rows("plan.yaml", ["system=sync"])[0]).rules.max_staleness == 0


def test_fixed_microbatches_hold_the_longest_answers(write):
    """32 groups of 16 in 4 minibatches on 8 ranks: 16 sequences each, of which one fits; of 4,352 tokens, seven."""
    path = write(PLAN)
    trainer = built(load_rows(path, ["trainer.microbatches=fixed", "train.minibatches=4"])[0]).cluster.trainer
    assert (trainer.microbatches, trainer.fixed_microbatches) == ("fixed", 16)
    short = ["rollout.max_new_tokens=4096", "trainer.microbatches=fixed", "train.minibatches=4"]
    assert built(load_rows(path, short)[0]).cluster.trainer.fixed_microbatches == 3


def test_from_run_takes_the_run_and_what_is_given_beside_it(write):
    path = write("from_run: RUN\nsystem: async\n")
    (row,) = load_rows(path)
    assert row.plan.from_run == str(Path.cwd() / "RUN")
    made = built(row, RUN)
    assert made.rules == msgspec.structs.replace(RUN.rules, eval_every=0)
    assert made.cluster == replace(RUN.cluster, server_gpus=1, trainer_gpus=1)
    changed = built(load_rows(path, [
        "rollout.max_staleness=0", "train.batch_groups=32", "servers.count=2", "servers.overhead_s=0.5",
        "reward.workers=4", "swap.interruptible=false", "trainer.step_s=2", "answers.mean_tokens=7",
        "answers.spread=0", "seed=3",
    ])[0], RUN)  # fmt: skip
    rules, cluster = changed.rules, changed.cluster
    assert (rules.max_staleness, rules.batch_groups, rules.servers, rules.seed, rules.steps) == (0, 32, 2, 3, 90)
    assert (cluster.server.overhead_s, cluster.server.context_s, cluster.servers) == (0.5, 1e-6, 2)
    assert (cluster.rewards, cluster.swap) == (RewardModel(0.001, 4), SwapModel(0.1, False))
    assert (cluster.trainer.step_s, cluster.trainer.publish_s) == (2.0, 0.05)
    assert cluster.answers.answer(0, 0, 1).length == 7


def test_beside_a_run_a_data_sheet_does_nothing(write):
    path = write("from_run: RUN\ngpu: {name: H100}\nsystem: colocated\n")
    assert wrong(path, "train.minibatches=3") == [
        "plan.yaml:2: gpu.name: does nothing beside from_run, whose run was measured; leave it out",
        "plan.yaml:3: system: colocated: a recorded run has servers and trainer apart; try async or sync",
    ]


def test_each_run_is_fitted_once_and_rows_that_are_wrong_are_named_together(write):
    asked = []

    def fit(run: Path) -> Fitted:
        asked.append(run.name)
        return RUN

    path = write("from_run: A\nsweep:\n  - {from_run: [A, B], train.steps: [1, 2]}\n")
    prepared = prepare(load_rows(path), fit)
    assert asked == ["A", "B"]
    assert [made.rules.steps for _, made in prepared] == [1, 2, 1, 2]
    with pytest.raises(ConfigError) as caught:
        prepare(load_rows(path, ["sweep.train.minibatches=[3,5]"]), fit)
    assert len(str(caught.value).split("\n")) == 2
