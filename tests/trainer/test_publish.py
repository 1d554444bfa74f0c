"""Published files: complete under their final name, freed when asked, and never begun without room."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from areal_async.engines.deepspeed import publish
from areal_async.engines.deepspeed.model import load_model, manifest, published_tensors, save_model
from areal_async.engines.deepspeed.publish import Publisher
from areal_async.engines.vllm.manifest import compare, expected_by, manifest_of
from areal_async.errors import TrainerError

from .world import CONFIGS, save_tiny_model

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", ["qwen2, tied", "llama", "gpt-neox"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_servers_find_what_they_expect(name: str, dtype: str, tmp_path: Path) -> None:
    model = load_model(str(save_tiny_model(tmp_path / "model", CONFIGS[name])), "float32", CPU)
    path, nbytes = Publisher("run", tmp_path).publish(3, published_tensors(model, dtype))
    assert path == tmp_path / "run-v3.safetensors"
    assert nbytes == path.stat().st_size
    found = manifest_of(str(path))
    compare(str(path), found, expected_by(model.config, getattr(torch, dtype)))
    assert {(p.name, p.shape, p.dtype) for p in manifest(model, dtype)} == {(n, *e) for n, e in found.items()}
    assert any("lm_head" in n or "embed_out" in n for n in found) == (not model.config.tie_word_embeddings)
    with safe_open(path, framework="pt") as file:
        for where, parameter in model.named_parameters():
            torch.testing.assert_close(file.get_tensor(where), parameter.detach().to(getattr(torch, dtype)))


def test_versions_are_freed(tmp_path: Path) -> None:
    publisher = Publisher("run", tmp_path)
    for version in range(4):
        publisher.publish(version, {"w": torch.full((4,), float(version))})
    publisher.free((0, 1, 17))
    assert sorted(file.name for file in tmp_path.iterdir()) == ["run-v2.safetensors", "run-v3.safetensors"]
    publisher.close()
    assert not list(tmp_path.iterdir())


def test_no_room_is_said_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    room = SimpleNamespace(f_bavail=5 << 8, f_frsize=4096)  # 5 MiB
    monkeypatch.setattr(publish.os, "statvfs", lambda _: room)
    publisher = Publisher("run", tmp_path)
    publisher.publish(0, {"w": torch.zeros(16)})
    with pytest.raises(TrainerError, match=rf"{tmp_path} has 5 MiB free, 9 needed \(v0 in it\); .*weights.folder"):
        publisher.publish(1, {"w": torch.zeros(2 << 20)})
    monkeypatch.setattr(publish, "SHM", tmp_path)
    with pytest.raises(TrainerError, match=rf"{tmp_path} has 5 MiB free, 9 needed \(v0 in it\); .*--shm-size"):
        publisher.publish(1, {"w": torch.zeros(2 << 20)})
    assert os.listdir(tmp_path) == ["run-v0.safetensors"]


def test_on_a_disk_bytes_are_there_before_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What another host sees under the final name was synced before; so was the name before it is told."""
    calls: list[str] = []
    fsync, rename = os.fsync, Path.rename
    monkeypatch.setattr(
        publish.os, "fsync", lambda fd: (calls.append(f"sync {os.readlink(f'/proc/self/fd/{fd}')}"), fsync(fd))[1]
    )
    monkeypatch.setattr(Path, "rename", lambda self, to: (calls.append(f"rename {to}"), rename(self, to))[1])
    folder = tmp_path / "not" / "there"
    Publisher("run", folder).publish(5, {"w": torch.zeros(4)})
    final = folder / "run-v5.safetensors"
    assert calls == [f"sync {folder / 'run.partial' / final.name}", f"rename {final}", f"sync {folder}"]
    calls.clear()
    monkeypatch.setattr(publish, "SHM", folder)  # memory needs no syncing
    Publisher("run", folder).publish(6, {"w": torch.zeros(4)})
    assert [call.split()[0] for call in calls] == ["rename"]


def test_a_folder_that_cant_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(TrainerError, match=r"version 0 can't be published: weights\.folder: .*file/x: Not a directory"):
        Publisher("run", tmp_path / "file" / "x").publish(0, {"w": torch.zeros(4)})


def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_tensors: object, path: Path, **_: object) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(publish, "save_file", full)
    with pytest.raises(TrainerError, match=r"version 1 could not be published .*No space left"):
        Publisher("run", tmp_path).publish(1, {"w": torch.zeros(1)})
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_what_a_killed_rank_leaves_has_the_runs_name(tmp_path: Path) -> None:
    """safetensors writes a file with a name of its own first: here it is what a process sees that is killed then."""
    begin = f"""
import os, sys
from pathlib import Path
import torch
from areal_async.engines.deepspeed.publish import Publisher
sys.addaudithook(lambda event, args: os._exit(9) if event == "os.rename" else None)
Publisher("run", Path({str(tmp_path)!r})).publish(1, {{"w": torch.zeros(4)}})
"""
    assert subprocess.run([sys.executable, "-c", begin]).returncode == 9
    assert os.listdir(tmp_path) == ["run.partial"]
    assert Publisher("run", tmp_path).publish(1, {"w": torch.zeros(4)})[0].exists()
    assert os.listdir(tmp_path) == ["run-v1.safetensors"]


@pytest.mark.parametrize("name", ["qwen2, tied", "llama", "gpt2, learned positions, dropout 0.1"])
def test_a_saved_model_is_an_ordinary_one(name: str, tmp_path: Path) -> None:
    source = save_tiny_model(tmp_path / "source", CONFIGS[name])
    model = load_model(str(source), "float32", CPU)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.25)
    for _ in range(2):  # again over what is there
        save_model(model, source, tmp_path / "saved")
    assert sorted(file.name for file in (tmp_path / "saved").iterdir()) == sorted(f.name for f in source.iterdir())
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert "areal" not in (tmp_path / "saved" / "config.json").read_text()
    for (where, mine), theirs in zip(model.named_parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, msg=where)


def test_a_model_that_is_none_is_said(tmp_path: Path) -> None:
    with pytest.raises(TrainerError, match=r"nowhere: transformers can't load it"):
        load_model(str(tmp_path / "nowhere"), "float32", CPU)
