"""What a well-formed configuration may still have wrong with it."""

import json
import os
import re
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from areal_async import config_check, config_rewards
from areal_async.cli import main
from areal_async.config_check import check, problems
from areal_async.config_file import Sources, load_config, load_with_sources
from areal_async.errors import ConfigError
from areal_async.rewards import jail

CONFIG = """\
name: mine
model:
  path: model
data:
  train: train.jsonl
rollout:
  max_new_tokens: 16
train:
  steps: 3
  batch_groups: 8
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A folder with mine.yaml, a model of one token a character (context 64), and ten problems."""
    monkeypatch.chdir(tmp_path)
    model = tmp_path / "model"
    model.mkdir()
    characters = [chr(code) for code in range(32, 127)]
    vocab = {"</s>": 0} | {character: i for i, character in enumerate(characters, 1)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.save(str(model / "tokenizer.json"))
    write_json(model / "config.json", {"max_position_embeddings": 64, "vocab_size": 128})
    write_json(model / "tokenizer_config.json", {"eos_token": "</s>"})
    (model / "model.safetensors").touch()
    write_rows([{"prompt": f"{i}+{i}=", "answer": 2 * i} for i in range(10)])
    Path("mine.yaml").write_text(CONFIG)
    return tmp_path


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value))


def write_rows(rows: list[dict[str, object]]) -> None:
    Path("train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def found(*overrides: str) -> list[str]:
    return problems(*load_with_sources("mine.yaml", overrides))


def test_nothing_is_wrong(project):
    assert found() == []
    check(*load_with_sources("mine.yaml"))


def test_the_message_of_the_style_guide(project):
    Path("mine.yaml").write_text(CONFIG.replace("batch_groups: 8", "batch_groups: 32\n  minibatches: 3"))
    message = "mine.yaml:11: train.minibatches: 3 does not divide train.batch_groups (32); try 2 or 4"
    assert found() == [message]
    with pytest.raises(ConfigError) as caught:
        check(*load_with_sources("mine.yaml"))
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("overrides", "messages"),
    [
        (["train.minibatches=16"], ["command line: train.minibatches: 16 does not divide train.batch_groups (8); try 8"]),  # noqa: E501
        (["train.ranks=65"], ["command line: train.ranks: 65 ranks, but a minibatch has only 64 samples (groups × rollout.group_size / train.minibatches); try 64"]),  # noqa: E501
        (["rollout.group_size=1"], ["command line: rollout.group_size: 1: under grpo a sample alone has no advantage and nothing is learned; try 8"]),  # noqa: E501
        (["rollout.min_group=9"], ["command line: rollout.min_group: 9 is more than rollout.group_size (8); try 8"]),
        (["rollout.max_concurrent=7"], ["command line: rollout.max_concurrent: 7 is less than one group (rollout.group_size is 8); try 64"]),  # noqa: E501
        (["rollout.servers=0"], ["command line: rollout.servers: 0, and there are no rollout.urls: nobody would answer; try 1"]),  # noqa: E501
        (["rollout.urls=[http://localhost:1, http://localhost:1]"], ["command line: rollout.urls: http://localhost:1 is named twice; keep one of them"]),  # noqa: E501
        (["rollout.urls=http://localhost:1", "server.cores=0"], ["command line: server.cores: names cores for 1, but rollout.servers is 0; leave it out"]),  # noqa: E501
        (["rollout.requeue=true"], ["command line: rollout.requeue: true: nothing is dropped with rollout.when_older wait; try false"]),  # noqa: E501
        (["rollout.requeue=true", "rollout.when_older=drop"], []),
        (["rollout.success_min=0.5", "rollout.success_max=0.25"], ["command line: rollout.success_min: 0.5 is more than rollout.success_max (0.25): no group passes; try 0.25 or less"]),  # noqa: E501
        (["rollout.success_min=0.5", "rollout.success_max=0.5"], []),
        (["train.loss=gspo", "train.dual_clip=3"], ["mine.yaml:8: train.aggregation: token_mean: gspo has one ratio for an answer; try sequence_mean", "command line: train.dual_clip: is not for gspo, whose ratios are those of whole answers; leave it out"]),  # noqa: E501
        (["train.loss=gspo", "train.aggregation=sequence_mean"], []),
        (["train.loss=ppo", "train.weight_cap=5"], ["command line: train.weight_cap: ppo has no behaviour weight to cap; leave it out, or try train.loss decoupled_ppo"]),  # noqa: E501
        (["train.loss=gspo", "train.aggregation=sequence_mean", "train.weight_cap=5"], []),
        (["train.reference_path=model"], ["command line: train.reference_path: with train.kl_coef 0 no reference model is loaded; leave it out"]),  # noqa: E501
        (["train.kl_coef=0.1", "train.reference_path=model"], []),
        (["train.kl_coef=0.1"], []),
        (["train.min_lr_share=0.1"], ["command line: train.min_lr_share: 0.1: with lr_schedule constant the rate never falls; try 0"]),  # noqa: E501
        (["train.min_lr_share=0.1", "train.lr_schedule=cosine"], []),
        (["train.warmup_steps=4"], ["command line: train.warmup_steps: 4 is more than the run has optimiser steps (3): the rate is never reached; try 0"]),  # noqa: E501
        (["train.warmup_steps=3"], []),
        (["train.truncated=penalize"], []),
        (["train.truncated=penalize", "reward.truncated_penalty=0"], ["command line: reward.truncated_penalty: 0: train.truncated is penalize, and nothing would be taken; try 1"]),  # noqa: E501
        (["reward.overlong_tokens=16"], ["command line: reward.overlong_tokens: 16 is the whole answer (rollout.max_new_tokens is 16); try 4"]),  # noqa: E501
        (["reward.overlong_tokens=15"], []),
        (["reward.overlong_tokens=4", "reward.overlong_penalty=0"], ["command line: reward.overlong_penalty: 0: reward.overlong_tokens would do nothing; try 1, or leave both out"]),  # noqa: E501
        (["eval.every_steps=1"], ["command line: eval.every_steps: there is nothing to evaluate on; name a file of held-out problems in data.eval"]),  # noqa: E501
        (["eval.every_steps=1", "data.eval=train.jsonl"], []),
        (["data.max_prompt_tokens=64"], ["command line: data.max_prompt_tokens: 64 leaves no room for an answer in the context (64); try 63 or less, or null"]),  # noqa: E501
        (["data.max_prompt_tokens=63"], []),
        (["weights.transport=disk", "weights.folder=mine.yaml"], ["command line: weights.folder: {}/mine.yaml isn't a folder that you may write to"]),  # noqa: E501
        (["weights.transport=disk", "weights.folder=a/b"], []),
        (["weights.wave=2"], ["command line: weights.wave: 2 is more than there are servers (1); try 1"]),
        (["train.lr=1e6"], ["command line: train.lr: 1e+06 is no learning rate; it must be at most 1; try 1e-06"]),
        (["train.betas=[1,-0.5]"], ["command line: train.betas[0]: must be ≥ 0 and < 1, not 1; try 0.9", "command line: train.betas[1]: must be ≥ 0 and < 1, not -0.5; try 0.95"]),  # noqa: E501
        (["reward.function=Exact"], ["command line: reward.function: 'Exact' is no reward; write one of exact, numeric, regex, choice, math, code, reasoning_gym, http, or `module:function`, one of your own; did you mean 'exact'?"]),  # noqa: E501
        (["reward.function=my/rewards.py:score"], ["command line: reward.function: 'my/rewards.py:score' is no reward; try my.rewards:score"]),  # noqa: E501
        (["reward.function=rewards.score"], ["command line: reward.function: 'rewards.score' is no reward; try rewards:score"]),  # noqa: E501
        (["reward.function=exact + mine:tidy", "reward.exact_after=x"], []),
        (["reward.function=0.9*exact 0.1*mine:tidy"], ["command line: reward.function: '0.9*exact 0.1*mine:tidy', character 11: '0.1' after a term; join terms by + or -"]),  # noqa: E501
        (["reward.function=rewards:score"], []),
        (["rollout.workflow=a.b:C"], []),
        (["rollout.workflow=a:b:C"], ["command line: rollout.workflow: must be single_turn, or an import path module:Class, not 'a:b:C'; try single_turn"]),  # noqa: E501
        (["reward.function=a:b", "reward.exact_after=x"], ["command line: reward.exact_after: is only read by `exact`, `numeric`, `choice` and `reasoning_gym`, and reward.function is a:b; leave it out"]),  # noqa: E501
        (["reward.sandbox=rlimits"], ["command line: reward.sandbox: is only read by `code`, and reward.function is exact; leave it out"]),  # noqa: E501
        (["reward.math.last_number=true"], ["command line: reward.math.last_number: is only read by `math`, and reward.function is exact; leave it out"]),  # noqa: E501
        (["reward.math.last_number=false", "reward.limits.memory_mib=100"], []),
        (["reward.function=regex"], ["command line: reward.regex.pattern: missing; the reward regex looks for it, such as 'answer is (\\d+)'"]),  # noqa: E501
        (["reward.function=regex", "reward.regex.pattern=("], ["command line: reward.regex.pattern: '(' is no regular expression: missing ), unterminated subpattern at position 0"]),  # noqa: E501
        (["reward.function=http"], ["command line: reward.http.url: missing; the reward http sends answers there, such as http://127.0.0.1:8000/score"]),  # noqa: E501
        (["reward.min_tokens=17"], ["command line: reward.min_tokens: 17 is more than rollout.max_new_tokens (16): no answer would have a reward; try 1"]),  # noqa: E501
        (["reward.min_tokens=16", "reward.max_tokens=16"], []),
        (["reward.min_tokens=5", "reward.max_tokens=4"], ["command line: reward.max_tokens: must lie between reward.min_tokens (5) and rollout.max_new_tokens (16), not 4; try 16, or null"]),  # noqa: E501
        (["reward.max_tokens=17"], ["command line: reward.max_tokens: must lie between reward.min_tokens (0) and rollout.max_new_tokens (16), not 17; try 16, or null"]),  # noqa: E501
        (["reward.scale=10", "reward.bias=-5"], []),
        (["reward.scale=10", "train.advantage=areal_paper"], ["command line: reward.scale: areal_paper has its own ±5 in place of 1 and 0; leave scale and bias out"]),  # noqa: E501
        (["server.extra_args=[--dtype=half, --uds, x, --foo]"], ["command line: server.extra_args: --dtype is set by the run itself; set model.dtype instead", "command line: server.extra_args: --uds is set by the run itself; leave it out"]),  # noqa: E501
        (["server.cores=a"], ["command line: server.cores: 'a' is no list of cores; write them as 0, 0-3 or 0,2, and | between two processes"]),  # noqa: E501
        (["server.cores=0|0"], ["command line: server.cores: names cores for 2, but rollout.servers is 1; write one part, without |"]),  # noqa: E501
        (["train.ranks=2", "train.cores=0|0", "train.zero_stage=1"], []),
        (["rollout.stop_token_ids=[-1, 5, 128]"], ["command line: rollout.stop_token_ids: -1, 128: the model's vocabulary ends at 127"]),  # noqa: E501
        (["server.max_model_len=65"], ["command line: server.max_model_len: 65 is more than the model's context (64); try 64"]),  # noqa: E501
        (["rollout.max_new_tokens=61"], ["command line: rollout.max_new_tokens: 61: the longest prompt ({}/train.jsonl:1) has 4 tokens, which leaves 60 of the context (64); try 60"]),  # noqa: E501
        (["server.max_model_len=18"], ["mine.yaml:7: rollout.max_new_tokens: 16: the longest prompt ({}/train.jsonl:1) has 4 tokens, which leaves 14 of the context (18); try 14"]),  # noqa: E501
        (["train.max_tokens_per_microbatch=19"], ["command line: train.max_tokens_per_microbatch: 19 has no room for one whole sample: the longest prompt ({}/train.jsonl:1) has 4 tokens, its answer up to 16; try 20 or more"]),  # noqa: E501
        (["train.max_tokens_per_microbatch=20"], []),
        (["model.path=modle"], ["command line: model.path: no such folder: {0}/modle; did you mean {0}/model?"]),
        (["model.path=."], ["command line: model.path: {} has no config.json; it isn't a model in Hugging Face form"]),
        (["data.train=train.json"], ["command line: data.train: no such file: {0}/train.json; did you mean {0}/train.jsonl?"]),  # noqa: E501
        (["data.eval=x/y"], ["command line: data.eval: no such file: {}/x/y; paths in the file count from its folder"]),
        (["data.answer_key=anwser"], ["command line: data.answer_key: 10 of 10 rows have no 'anwser', which reward.function exact compares with ({}/train.jsonl:1 is the first; its other columns are answer)"]),  # noqa: E501
        (["data.prompt_key=answer"], ["{}/train.jsonl:%d: column 'answer' must be text or a list of messages"]),
        (["data.eval=train.jsonl", "eval.max_new_tokens=61"], ["command line: eval.max_new_tokens: 61: the longest prompt ({}/train.jsonl:1) has 4 tokens, which leaves 60 of the context (64); try 60"]),  # noqa: E501
        (["runs_dir=mine.yaml"], ["command line: runs_dir: {}/mine.yaml isn't a folder that you may write to"]),
        (["runs_dir=a/b/c"], []),
    ],
)  # fmt: skip
def test_a_problem(project, overrides, messages):
    expected = [message.replace("{0}", str(project)).replace("{}", str(project)) for message in messages]
    if "%d" in "".join(messages):
        expected = [expected[0] % line for line in range(1, 11)]
    assert found(*overrides) == expected


def test_a_model_without_weights(project):
    (project / "model" / "model.safetensors").unlink()
    assert found() == [
        f"mine.yaml:3: model.path: {project}/model has no weights (*.safetensors); a download may have been broken off"
    ]


def test_shared_memory_that_is_too_small(project, monkeypatch):
    (project / "model" / "model.safetensors").write_bytes(bytes(10 << 20))
    room = 190 << 20  # 160 MiB for vLLM, and three times 10
    monkeypatch.setattr(config_check.shutil, "disk_usage", lambda path: SimpleNamespace(free=room))
    assert found() == []
    room -= 1 << 20
    (message,) = found()
    assert "weights.transport: /dev/shm has 189 MiB free, and this run needs about 190 MiB" in message


def test_cores_that_this_machine_has_not(project):
    allowed = os.sched_getaffinity(0)
    message = found("server.cores=0-99999999,7777")
    assert len(message) == 1
    assert "this machine lets us use the cores " + ", ".join(map(str, sorted(allowed))) in message[0]
    assert found(f"server.cores={min(allowed)}") == []


# ----------------------------------------------------------------------------------------------------- P32: few prompts


def test_five_prompts_for_a_batch_of_eight(project):
    write_rows([{"prompt": f"{i}", "answer": i} for i in range(5)])
    assert found() == []  # repeated as often as needed
    assert found("data.epochs=2") == []
    assert found("data.epochs=1") == [
        "command line: data.epochs: 1: 5 prompts × 1 never fill a batch of train.batch_groups (8); "
        "try 2, or null for as often as needed"
    ]


# ------------------------------------------------------------------------------------------------------ folders, files


def test_a_folder_that_others_may_enter(project):
    folder = project / "r"
    folder.mkdir(mode=0o755)
    folder.chmod(0o755)
    assert found("runtime_dir=r") == [
        f"command line: runtime_dir: others may enter {folder} (mode 0755); chmod 700 it, or name a new folder"
    ]
    folder.chmod(0o700)
    long = len(os.fsencode(folder)) > 75
    assert [line for line in found("runtime_dir=r") if "mode" in line] == []
    assert bool(found("runtime_dir=r")) == long
    assert "is not a folder" in found("runtime_dir=mine.yaml")[-1]


@pytest.mark.parametrize(("length", "wrong"), [(75, False), (76, True)])
def test_a_folder_whose_sockets_have_too_long_a_path(project, length, wrong):
    lines = found("runtime_dir=/" + "r" * (length - 1))
    assert bool(lines) == wrong
    if wrong:
        assert lines[0].endswith(f"(at most 75 for the folder); try /tmp/areal-{os.getuid()}")


def test_a_temporary_folder_with_a_long_path(project, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", "/tmp/" + "é" * 40)
    assert found()[0].startswith("mine.yaml:1: runtime_dir: /tmp/é")


def test_a_prompt_without_room(project):
    write_rows([{"prompt": "1", "answer": 1}, {"prompt": "1" * 64, "answer": 1}])
    assert found() == [
        f"mine.yaml:4: data.long_prompts: error: 1 of 2 prompts has more than 63 tokens, first {project}/train.jsonl:2 "
        "(64); data.long_prompts: skip leaves them out, cut asks their ends"
    ]
    Path("eval.jsonl").write_text(Path("train.jsonl").read_text())
    write_rows([{"prompt": "1", "answer": 1}])
    assert found("data.eval=eval.jsonl") == [
        f"command line: data.eval: the longest prompt ({project}/eval.jsonl:2) has 64 tokens, and the context 64: "
        "there is no room for an answer; leave it out or shorten it"
    ]


def test_prompts_that_are_too_long(project):
    write_rows([{"prompt": "1" * n, "answer": 1} for n in (9, 12, 10, 11, 40)])
    say = "command line: data.long_prompts: "
    assert found("data.max_prompt_tokens=10", "data.long_prompts=error") == [
        f"{say}error: 3 of 5 prompts have more than 10 tokens, first {project}/train.jsonl:2 (12), "
        f"{project}/train.jsonl:4 (11), {project}/train.jsonl:5 (40); "
        "data.long_prompts: skip leaves them out, cut asks their ends"
    ]
    assert found("data.max_prompt_tokens=10", "data.long_prompts=skip") == []
    assert found("data.max_prompt_tokens=10", "data.long_prompts=cut") == []
    assert found("data.max_prompt_tokens=10", "data.long_prompts=skip", "data.epochs=2") == [
        "command line: data.epochs: 2: 2 prompts × 2 never fill a batch of train.batch_groups (8); "
        "try 4, or null for as often as needed"
    ]
    assert found("data.max_prompt_tokens=8", "data.long_prompts=skip") == [
        f"{say}skip: {project}/train.jsonl has no prompt of at most 8 tokens"
    ]
    # what is cut leaves room: 40 tokens and an answer of 26 would not fit the context, 38 do
    assert found("rollout.max_new_tokens=26", "data.long_prompts=cut", "data.max_prompt_tokens=38") == []
    assert found("rollout.max_new_tokens=26", "data.long_prompts=cut", "data.max_prompt_tokens=39") == [
        "command line: rollout.max_new_tokens: 26: the longest prompt (data.max_prompt_tokens) has 39 tokens, which "
        "leaves 25 of the context (64); try 25"
    ]


def test_only_the_longest_prompts_of_many_are_tokenized(project, monkeypatch):
    monkeypatch.setattr(config_check, "PROMPTS_TOKENIZED", 2)
    write_rows([{"prompt": "1" * n, "answer": 1} for n in (9, 12, 10, 11, 40)])
    (line,) = found("data.max_prompt_tokens=8")
    assert "error: 2 of 5 prompts have more than 8 tokens" in line


def test_several_files_with_shares(project):
    Path("more.jsonl").write_text('{"prompt": "7", "answer": 7}\n')
    both = "data.train=[train.jsonl, more.jsonl]"
    assert found(both, "data.weights=[0.9, 0.1]") == []
    assert found(both, "data.weights=[1]") == [
        "command line: data.weights: 1 shares for 2 files of data.train; write one for each, or leave it out"
    ]
    assert found("data.train=[train.jsonl, mroe.jsonl, none]") == [
        f"command line: data.train: no such file: {project}/mroe.jsonl; did you mean {project}/more.jsonl?",
        f"command line: data.train: no such file: {project}/none; paths in the file count from its folder",
    ]
    Path("more.jsonl").write_text('x\n{"prompt": "7", "answer": 7}\n')
    write_rows([{"prompt": ""}])
    assert [line.partition(": ")[0] for line in found(both)] == [f"{project}/train.jsonl:1", f"{project}/more.jsonl:1"]
    write_rows([{"prompt": "1" * 9, "answer": 1}])
    Path("more.jsonl").write_text('{"prompt": "7", "answer": 7}\n')
    assert found(both, "data.weights=[1,1]", "data.max_prompt_tokens=8", "data.long_prompts=skip") == [
        f"command line: data.long_prompts: skip: {project}/train.jsonl has no prompt of at most 8 tokens"
    ]
    assert found(both, "data.max_prompt_tokens=8", "data.long_prompts=skip") == []


def test_a_reference_model(project):
    kl = ["train.kl_coef=0.1", "train.reference_path=other"]
    (project / "other").mkdir()
    assert found(*kl) == [
        f"command line: train.reference_path: {project}/other has no config.json; name a model's folder, or null for "
        "model.path"
    ]
    write_json(Path("other/config.json"), {"vocab_size": 129})
    assert found(*kl) == [
        "command line: train.reference_path: its vocabulary has 129 entries, that of model.path 128: "
        "log-probabilities of the two can't be compared"
    ]
    write_json(Path("other/config.json"), {"text_config": {"vocab_size": 128}})
    assert found(*kl) == []
    Path("other/config.json").write_text("{")
    assert "other/config.json: not JSON" in found(*kl)[0]


def test_heads_that_can_not_be_shared(project, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5")
    settings = {"max_position_embeddings": 64, "vocab_size": 128, "num_attention_heads": 6}
    write_json(Path("model/config.json"), settings)
    assert found("server.tensor_parallel=3") == []
    assert found("server.tensor_parallel=4") == [
        "command line: server.tensor_parallel: 4 does not divide the model's attention heads (6); try 3 or 6"
    ]


def test_a_port_that_is_taken(project):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert found(f"metrics.port={port}") == [
            f"command line: metrics.port: 127.0.0.1:{port} can't be opened: Address already in use; "
            "try another, or 0 for any free one"
        ]
    assert found(f"metrics.port={port}") == found("metrics.port=0") == []
    assert found("metrics.port=0", "metrics.host=no.such.host.invalid")[0].startswith("command line: metrics.port")


def test_tensorboard_that_is_not_installed(project, monkeypatch):
    monkeypatch.setattr(config_check.importlib.util, "find_spec", lambda name: None)
    assert found("metrics.tensorboard=true") == [
        "command line: metrics.tensorboard: the package tensorboard is not installed; "
        "pip install 'areal-async[tensorboard]', or leave it out"
    ]


def test_wandb_that_is_not_installed(project, monkeypatch):
    monkeypatch.setattr(config_check.importlib.util, "find_spec", lambda name: None)
    assert found("metrics.wandb=offline") == [
        "command line: metrics.wandb: the package wandb is not installed; pip install 'areal-async[wandb]', or leave "
        "it out"
    ]
    assert found("metrics.wandb=off") == []


def test_a_server_whose_socket_is_not_there(project):
    with socket.socket(socket.AF_UNIX) as server, tempfile.TemporaryDirectory() as folder:
        server.bind(f"{folder}/s")
        urls = f"rollout.urls=[unix:{folder}/s, unix:{folder}/t]"
        assert found(urls) == [
            f"command line: rollout.urls[1]: no such socket: {folder}/t; start that server first (docs/servers.md)"
        ]


def test_a_prompt_that_the_template_refuses_and_one_of_another_tokenizer(project):
    write_rows([{"prompt": "1", "answer": 1}, {"prompt": [{"role": "user", "content": "x"}], "answer": 1}])
    assert found() == [
        f"{project}/train.jsonl:2: the prompt is a list of messages, but the model's tokenizer has no chat template"
    ]
    write_rows([{"prompt": "1", "answer": 1}, {"prompt": "~", "answer": 1}])
    write_json(Path("model/config.json"), {"max_position_embeddings": 64, "vocab_size": 95})
    assert found() == [
        f"{project}/train.jsonl:2: token 95 of the prompt is outside the model's vocabulary (95); "
        "model.path holds another model's tokenizer"
    ]


def test_a_model_without_an_end(project):
    write_json(Path("model/tokenizer_config.json"), {})
    assert found() == [
        "mine.yaml:6: rollout.stop_token_ids: empty, and the model names no end of sequence: no answer would ever stop"
    ]
    assert found("rollout.stop_token_ids=[0]") == []


def test_files_of_the_model_are_named(project):
    Path("model/tokenizer.json").unlink()
    assert found()[0].startswith(f"mine.yaml:3: model.path: {project}/model/tokenizer.json: no such file")


def test_all_at_once_and_without_a_file(project):
    lines = found("train.minibatches=3", "model.path=nowhere", "data.train=nowhere.jsonl", "weights.wave=3")
    assert [line.split(": ")[1] for line in lines] == ["train.minibatches", "weights.wave", "model.path", "data.train"]
    config = load_config("mine.yaml", ["train.minibatches=3"])
    assert problems(config, Sources.in_code()) == [
        "Config: train.minibatches: 3 does not divide train.batch_groups (8); try 2 or 4"
    ]


def test_no_heavy_import(project):
    program = (
        "import sys; from areal_async.config_file import load_with_sources; from areal_async.config_check import check;"
        "check(*load_with_sources('mine.yaml')); print([m for m in ('torch', 'transformers', 'vllm', 'numpy',"
        "'huggingface_hub') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


# ------------------------------------------------------------------------------------------- rewards, and their rows


def test_rows_that_code_can_not_test(project):
    good = {"inputs": ["1\n"], "outputs": ["1\n"]}
    rows = [
        {"prompt": "p", "tests": {"inputs": ["1"], "outputs": ["1"]}},
        {"prompt": "p", "input_output": json.dumps(good)},
    ]
    write_rows(rows * 5)
    assert found("reward.function=code") == []
    write_rows([*rows, {"prompt": "p", "tests": {"inputs": ["1"], "outputs": []}}, {"prompt": "p"}])
    (line,) = found("reward.function=0.5*code + 0.5*mine:tidy", "train.batch_groups=4")
    assert line.startswith(
        f"mine.yaml:5: data.train: 2 of 4 rows can't be checked by code: {project}/train.jsonl:3: column tests: "
        f"1 inputs and 0 outputs; {project}/train.jsonl:4: the data row has no tests: "
    )


def test_golds_that_math_can_not_read(project, caplog):
    good = [{"prompt": "p", "answer": answer} for answer in ("1", "\\frac{1}{2}", "x^2", "(1, 2]", "A")]
    write_rows(good * 4)
    assert found("reward.function=math") == []
    assert caplog.messages == []
    write_rows([*good * 4, {"prompt": "p", "answer": "as we have seen above"}])
    assert found("reward.function=math") == []
    assert caplog.messages == [
        f"data.train: 1 of 21 rows can't be checked by math: {project}/train.jsonl:21: the data row's answer can't be "
        "read as mathematics: as we have seen above; their samples will be left out, and counted"
    ]
    write_rows([*good * 4, *[{"prompt": "p", "answer": "as we have seen above"}] * 4])
    (line,) = found("reward.function=math")
    assert line.startswith("mine.yaml:5: data.train: 4 of 24 rows can't be checked by math: ")
    assert line.endswith(" …")
    write_rows([*good * 2, {"prompt": "p"}, {"prompt": "p"}])
    (line,) = found("reward.function=math")
    assert line.startswith("mine.yaml:4: data.answer_key: 2 of 12 rows have no 'answer', which reward.function math")


def test_rows_of_the_other_rewards(project):
    write_rows([{"prompt": "p", "answer": "4"}] * 8 + [{"prompt": "p", "answer": "four"}])
    (line,) = found("reward.function=numeric")
    assert line.startswith(
        f"mine.yaml:5: data.train: 1 of 9 rows can't be checked by numeric: {project}/train.jsonl:9: "
    )
    assert found("reward.function=regex", "reward.regex.pattern=x") == []
    assert found("reward.function=mine:tidy") == []


def test_a_row_whose_check_raises(project, monkeypatch):
    def raises(check):
        raise ValueError("no such row")

    monkeypatch.setattr(config_rewards, "load", lambda spec: raises)
    (line,) = found("reward.function=exact")
    assert line.startswith(
        f"mine.yaml:5: data.train: 10 of 10 rows can't be checked by exact: {project}/train.jsonl:1: its check raises "
        "ValueError('no such row'); "
    )


def test_much_data_is_looked_at_here_and_there(project, monkeypatch):
    monkeypatch.setattr(config_rewards, "ROWS_LOOKED_AT", 10)
    write_rows([{"prompt": "p", "answer": "4"}] * 90 + [{"prompt": "p", "answer": "four"}] * 10)
    (line,) = found("reward.function=numeric")
    assert "1 of 10 rows can't be checked" in line
    monkeypatch.setattr(config_rewards, "LOOK_S", 0)
    assert found("reward.function=numeric") == []


def test_code_without_a_jail(project, monkeypatch, capsys):
    write_rows([{"prompt": "p", "tests": {"inputs": ["1"], "outputs": ["1"]}}] * 8)
    assert main(["check", "mine.yaml", "reward.function=code"]) == 0
    assert re.search("\nmodel-written code runs in: own session, rlimits.*, bubblewrap\n", capsys.readouterr().out)
    monkeypatch.setattr(jail, "PROGRAM", "no-such-program")
    (line,) = found("reward.function=code")
    assert line.startswith(
        "command line: reward.sandbox: bubblewrap, and it can't be used here: there is no `no-such-program`"
    )
    assert "reward.sandbox=rlimits" in line
    assert main(["check", "mine.yaml", "reward.function=code", "reward.sandbox=rlimits"]) == 0
    told = capsys.readouterr().out
    assert re.search("\nmodel-written code runs in: own session, rlimits", told)
    assert "\nWARNING: without bubblewrap: " in told
    assert found("reward.function=mine:tidy") == []  # asks for no jail
