"""The committed quickstart files are what tools/make_quickstart.py makes, and hold what a run relies on.

The weights are not trained again here: they are only as reproducible as floating point on one kind of machine.
"""

import json
import random
import sys
from pathlib import Path
from types import ModuleType

import pytest
from safetensors import safe_open

ROOT = Path(__file__).resolve().parent.parent
QUICKSTART = ROOT / "configs" / "quickstart"
MODEL = QUICKSTART / "model"
LARGEST_SAFETENSORS_BYTES = 4_000_000  # it lives in the repository


@pytest.fixture(scope="module")
def made() -> ModuleType:
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        import make_quickstart
    finally:
        sys.path.pop(0)
    return make_quickstart


def rows(name: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in (QUICKSTART / name).read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("name", ["train.jsonl", "eval.jsonl"])
def test_data_are_what_the_tool_makes(made: ModuleType, tmp_path: Path, name: str) -> None:
    made.write_data(tmp_path)
    assert (QUICKSTART / name).read_bytes() == (tmp_path / name).read_bytes()


def test_every_problem_occurs_once_in_train_and_eval_together() -> None:
    train, held_out = rows("train.jsonl"), rows("eval.jsonl")
    assert (len(train), len(held_out)) == (6000, 500)
    assert len({row["prompt"] for row in train + held_out}) == 6500


def test_answers_are_right() -> None:
    for row in rows("train.jsonl") + rows("eval.jsonl"):
        start, product = str(row["prompt"]).removesuffix(":").split("+")
        step, times = product.split("*")
        assert (row["answer"], row["terms"]) == (str(int(start) + int(step) * int(times)), int(times))


def test_working_ends_in_the_answer_and_lengths_have_a_long_tail(made: ModuleType) -> None:
    train, held_out = made.draw_data()
    for problem in train + held_out:
        assert made.solution(problem).endswith(f",1={problem.answer}>{problem.answer}")
    lengths = sorted(len(made.solution(problem)) + 1 for problem in train)  # one token a character, and eos
    assert lengths[0] <= 16
    assert lengths[-1] >= 120
    assert 30 <= sum(lengths) / len(lengths) <= 50
    assert lengths[len(lengths) * 99 // 100] >= 3 * lengths[len(lengths) // 2]
    longest_prompt = max(len(problem.prompt) for problem in train + held_out)
    assert longest_prompt + lengths[-1] <= made.CONTEXT_TOKENS


@pytest.mark.slow
def test_supervised_data_leave_out_eval_and_cover_only_the_solution(made: ModuleType) -> None:
    tokenizer, held_out = made.build_tokenizer(), {problem.prompt for problem in made.draw_data()[1]}
    batches = made.supervised_batches(random.Random(0))
    for _ in range(200):
        token_ids, labels = next(batches)
        for row, label in zip(token_ids.tolist(), labels.tolist(), strict=True):
            text = tokenizer.decode(row)
            prompt, colon, rest = text.partition(":")
            assert prompt + colon not in held_out
            learnt = tokenizer.decode([token for token in label if token != made.IGNORED])
            assert learnt == rest.replace(made.PAD, "")
            assert learnt.endswith(made.EOS)


def test_lazy_solutions_stop_early_and_are_right_when_they_do_not(made: ModuleType) -> None:
    rng, problem = random.Random(0), made.Problem(37, 6, 8)
    texts = [made.lazy_solution(problem, rng) for _ in range(2000)]
    complete = [text for text in texts if text == made.solution(problem)]
    assert len(complete) / len(texts) == pytest.approx((1 - made.STOP_EARLY) ** 7, abs=0.04)
    assert all("1=" not in text.split(",")[-1].split("=")[0] + "=" for text in texts if text not in complete)


def test_committed_tokenizer_and_configuration_are_what_the_tool_makes(made: ModuleType, tmp_path: Path) -> None:
    made.build_tokenizer().save_pretrained(tmp_path)
    made.build_config().save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        committed, fresh = (json.loads((folder / name).read_text()) for folder in (MODEL, tmp_path))
        # the version of transformers that wrote a file says nothing about what is in it
        assert {**committed, "transformers_version": None} == {**fresh, "transformers_version": None}


def test_tokenizer_round_trip_adds_nothing(made: ModuleType) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    for problem in made.draw_data()[1]:
        text = problem.prompt + made.solution(problem)
        token_ids = tokenizer.encode(text)
        assert len(token_ids) == len(text)
        assert tokenizer.unk_token_id not in token_ids
        assert tokenizer.decode(token_ids) == text
    assert tokenizer.bos_token is None
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 1)
    assert tokenizer.encode(f"7{made.EOS}") == [*tokenizer.encode("7"), 1]


def test_generation_stops_at_eos_and_samples_at_temperature_one() -> None:
    generation = json.loads((MODEL / "generation_config.json").read_text())
    assert generation["do_sample"] is True
    assert generation["temperature"] == 1.0
    assert (generation["pad_token_id"], generation["eos_token_id"]) == (0, 1)


def test_weights_are_small_float32_untied_and_fit_the_configuration(made: ModuleType) -> None:
    import torch
    from transformers import Qwen2ForCausalLM

    path = MODEL / "model.safetensors"
    assert path.stat().st_size <= LARGEST_SAFETENSORS_BYTES
    with safe_open(path, framework="pt") as weights:
        shapes = {name: tuple(weights.get_slice(name).get_shape()) for name in weights.keys()}  # noqa: SIM118
        dtypes = {weights.get_slice(name).get_dtype() for name in weights.keys()}  # noqa: SIM118
    with torch.device("meta"):
        expected = {name: tuple(p.shape) for name, p in Qwen2ForCausalLM(made.build_config()).named_parameters()}
    assert shapes == expected
    assert dtypes == {"F32"}
    assert "lm_head.weight" in shapes
