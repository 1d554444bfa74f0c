"""Samples of a run as JSON lines: each finished one once, with its arrays, its texts and what became of it."""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from areal_async import cli
from areal_async.log.writer import RunLog
from areal_async.messages import Release, SampleDone
from areal_async.testing.small_run import write_model
from areal_async.trace.samples import LOST

from ..audit_lies import true_log
from .written import arrays, is_done, write

FIELDS = (
    *("id", "group", "member", "attempt", "row", "position", "outcome", "step", "branch", "advantage", "lag"),
    *("verdict", "reward", "finish", "prompt_tokens", "response_tokens", "oldest", "newest", "floor", "server"),
    *("times", "prompt", "response", "prompt_ids", "response_ids", "loss_mask", "logprobs", "versions", "missing"),
)


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("trace") / "run", true_log())


def samples(capsys: pytest.CaptureFixture[str], run: Path, *options: str) -> tuple[list[dict[str, Any]], str]:
    assert cli.main(["trace", str(run), "--samples", "-", *options]) == 0
    out, err = capsys.readouterr()
    return [json.loads(line) for line in out.splitlines()], err


def test_each_finished_sample_is_there_once(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found, err = samples(capsys, run_folder)
    done = {record.sample: record for record in true_log() if isinstance(record, SampleDone)}
    assert {each["id"] for each in found} == done.keys()
    assert len(found) == len(done)
    assert Counter(each["outcome"] for each in found) == {"trained": 24, "filtered": 2}
    assert all(tuple(each) == FIELDS for each in found)
    assert f"no texts, tokens only: {run_folder / 'config.yaml'} names no model.path; " in err
    assert err.endswith("26 finished samples\n")
    for each in found:
        told = done[each["id"]]
        ids, mask, logprobs, versions = arrays(told)
        count = told.prompt_tokens
        assert each["prompt_ids"] + each["response_ids"] == ids.tolist()
        assert each["loss_mask"] == mask[count:].tolist()
        assert each["versions"] == versions[count:].tolist()
        assert np.array(each["logprobs"], np.float32).tobytes() == logprobs[count:].tobytes()
        assert (each["prompt"], each["response"], each["missing"]) == (None, None, "")


def test_what_became_of_a_sample(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = {each["id"]: each for each in samples(capsys, run_folder)[0]}
    again, filtered, retrained = found["0.0"], found["1.0"], found["5.0"]
    assert (again["attempt"], again["step"], again["branch"], again["lag"]) == (1, 1, 0, 1)
    assert again["times"] == {
        **{"asked": 6.0, "started": 14.0, "answered": 26.0, "scored": 38.0, "ready": 38.0, "handed": 45.0},
        "trained": 46.0,
    }
    assert (filtered["outcome"], filtered["step"], filtered["advantage"]) == ("filtered", None, None)
    assert (retrained["step"], retrained["branch"], retrained["times"]["trained"]) == (2, 1, 63.0)
    assert (retrained["verdict"], retrained["server"], retrained["floor"]) == ("right", "server1", 0)


@pytest.mark.slow
def test_of_a_step_that_is_to_be_trained_again_nothing_is_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = list(true_log())
    back = next(number for number, record in enumerate(log) if type(record).__name__ == "RolledBack")
    found, _ = samples(capsys, write(tmp_path, log[: back + 1]))
    by_id = {each["id"]: each for each in found}
    assert (by_id["5.0"]["outcome"], by_id["5.0"]["step"], by_id["5.0"]["branch"]) == ("training", None, None)
    assert by_id["0.0"]["outcome"] == "trained"
    assert {each["outcome"] for each in found} == {"trained", "training", "filtered"}


@pytest.mark.slow
def test_filters(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def names(*options: str) -> set[str]:
        return {each["id"] for each in samples(capsys, run_folder, *options)[0]}

    assert names("--step", "2") == names("--id", "step 2") == {"5.0", "5.1", "6.0", "6.1"}
    assert names("--id", "3", "--id", "4.1") == {"3.0", "3.1", "4.1"}
    assert names("--verdict", "wrong") == set()
    assert len(names("--verdict", "right", "--verdict", "given")) == 26
    assert names("--id", "server server0") | names("--id", "server server1") == names()


@pytest.mark.slow
def test_texts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tmp_path / "model"
    write_model(model)
    write(tmp_path, true_log(), tokens=[10, 11, 12, 13])
    (tmp_path / "config.yaml").write_text(f"model: {{path: {tmp_path / 'gone'}}}\n")
    found, err = samples(capsys, tmp_path, "--id", "0.0")  # the model of the end has the tokenizer, too
    from areal_async.rollout.text import Text

    text = Text(str(model))
    assert found[0]["prompt"] == text.decode_all(found[0]["prompt_ids"]) != ""
    assert found[0]["response"] == text.decode_all(found[0]["response_ids"])
    assert err == "1 finished samples\n"
    (tmp_path / "config.yaml").write_text(f"model: {{path: {model}}}\n")
    assert samples(capsys, tmp_path, "--id", "0.0")[0] == found


def test_what_has_left_the_disk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (write(tmp_path, true_log()) / "log" / "payload-000001.seg").unlink()
    found, err = samples(capsys, tmp_path)
    gone = [each for each in found if each["missing"]]
    assert 0 < len(gone) < len(found) == 26
    why = "released: payload-000001.seg was deleted when nobody could ask for its samples again"
    assert all((each["response_ids"], each["logprobs"]) == (None, None) for each in gone)
    assert f"26 finished samples, {len(gone)} of them without arrays: their `missing` says why" in err
    released = {name for record in true_log() if isinstance(record, Release) for name in record.samples}
    assert {each["id"] for each in gone if each["missing"] == why} == {each["id"] for each in gone} & released != set()
    assert {each["missing"] for each in gone if each["id"] not in released} <= {LOST}


def test_what_was_lost_is_not_said_to_be_released(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All segments are gone, also those of samples that nobody has released; the audit names as many."""
    folder = write(tmp_path, true_log())
    for segment in (folder / "log").glob("payload-*.seg"):
        segment.unlink()
    found, _ = samples(capsys, tmp_path)
    lost = [each for each in found if each["missing"] == LOST]
    assert 0 < len(lost) < len(found)
    assert cli.main(["audit", str(folder)]) == 1
    said = re.findall(r"isn't there; (\d+) samples in it were never released", capsys.readouterr().out)
    assert sum(map(int, said)) == len(lost)


@pytest.mark.slow
def test_a_file_is_whole_or_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, true_log())
    target = tmp_path / "samples.jsonl"
    target.write_text("before\n")
    path = tmp_path / "log" / "payload-000002.seg"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert cli.main(["trace", str(tmp_path), "--samples", str(target)]) == 1
    assert f"areal-async: {path}: corrupt record at offset" in capsys.readouterr().err
    assert target.read_text() == "before\n"
    data[-1] ^= 1
    path.write_bytes(data)
    assert cli.main(["trace", str(tmp_path), "--samples", str(target)]) == 0
    assert len(target.read_text().splitlines()) == 26
    assert sorted(each.name for each in tmp_path.iterdir()) == ["log", "samples.jsonl"]
    assert cli.main(["trace", str(tmp_path), "--samples", str(tmp_path / "no" / "where")]) == 2
    assert f"there is no folder {tmp_path / 'no'}" in capsys.readouterr().err


@pytest.mark.slow
def test_a_reference_to_another_sample(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is told of one sample with the arrays of another."""
    run_log = RunLog(tmp_path / "log", segment_bytes=1 << 20)
    done = [record for record in true_log() if is_done(record)]
    refs = [run_log.put(record.sample, record.attempt, arrays(record)) for record in done]
    following = iter([refs[1], refs[0], *refs[2:]])
    for record in true_log():
        run_log.append(record, next(following) if is_done(record) else None)
    run_log.close()
    assert cli.main(["trace", str(tmp_path), "--samples", "-"]) == 1
    assert "lies sample 0.1, attempt 0, where the log has sample 1.0" in capsys.readouterr().err
