"""Files that a command makes are whole or aren't there; what is no file stays what it is."""

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from areal_async import output_file
from areal_async.errors import ArealError, ConfigError


def write(path: Path, data: bytes) -> None:
    with output_file.whole(path) as file:
        file.write(data)


def write_half(path: Path, error: type[BaseException]) -> None:
    with output_file.whole(path) as file:
        file.write(b"half")
        raise error


@pytest.mark.parametrize("name", ["a.json", "ünï 模型", "x" * 255, "模" * 85])
def test_a_file_is_there_when_it_is_whole(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(b"before")
    with output_file.whole(path) as file:
        file.write(b"now")
        file.flush()
        assert path.read_bytes() == b"before"
    assert [(each.name, each.read_bytes()) for each in tmp_path.iterdir()] == [(name, b"now")]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_after_an_error_nothing_has_changed(tmp_path: Path, error: type[BaseException]) -> None:
    for path in (tmp_path / "new", tmp_path / "old"):
        if path.name == "old":
            path.write_bytes(b"before")
        with pytest.raises(error):
            write_half(path, error)
    assert [(each.name, each.read_bytes()) for each in tmp_path.iterdir()] == [("old", b"before")]


def test_two_at_once_leave_one_of_both_whole(tmp_path: Path) -> None:
    path = tmp_path / "a"
    with output_file.whole(path) as one, output_file.whole(path) as other:
        one.write(b"1" * 5)
        other.write(b"2" * 3)
    assert [each.read_bytes() for each in tmp_path.iterdir()] == [b"1" * 5]


def test_a_link_stays_one(tmp_path: Path) -> None:
    for name in ("there", "not there yet"):
        (tmp_path / f"to {name}").symlink_to(name)
    (tmp_path / "there").write_bytes(b"before")
    for name in ("there", "not there yet"):
        write(tmp_path / f"to {name}", b"now")
        assert (tmp_path / f"to {name}").is_symlink()
        assert (tmp_path / name).read_bytes() == b"now"


def test_what_is_no_file_is_written_to_and_stays_what_it_is(tmp_path: Path) -> None:
    assert not output_file.is_replaceable(Path("/dev/null"))
    assert not output_file.is_replaceable(Path("/dev/stdout")) or os.path.isfile("/dev/stdout")
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write(fifo, b"through")
        assert os.read(reader, 100) == b"through"
    finally:
        os.close(reader)
    assert stat.S_ISFIFO(fifo.stat().st_mode)
    assert list(tmp_path.iterdir()) == [fifo]


@pytest.mark.parametrize("name", ["", ".", "..", "/", "folder", "folder/", "nowhere/file", "file/file"])
def test_what_can_be_no_file_is_one_clear_line(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_bytes(b"")
    path = Path(name)
    with pytest.raises(ConfigError, match=r"^command line: --out .*: (is a folder|there is no folder)"):
        output_file.check("--out", path)
    with pytest.raises(ArealError, match=r"can't be written: [A-Z]"):
        write(path, b"now")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["file", "folder"]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no such device")
def test_a_full_disk_is_one_clear_line() -> None:
    with pytest.raises(ArealError, match=r"^/dev/full: can't be written: No space left on device$"):
        write(Path("/dev/full"), b"now")


STOPPED = """
import sys, time
from pathlib import Path
from areal_async import output_file
from areal_async.cli_output import ended_by_sigterm
with ended_by_sigterm(), output_file.whole(Path(sys.argv[1])) as file:
    file.write(b"half")
    print("half", flush=True)
    time.sleep(60)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, -signal.SIGINT)])
def test_a_signal_leaves_nothing(tmp_path: Path, number: signal.Signals, code: int) -> None:
    command = [sys.executable, "-c", STOPPED, str(tmp_path / "out")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"half\n"
        assert len(list(tmp_path.iterdir())) == 1
        process.send_signal(number)
        assert process.wait(30) == code
    assert not list(tmp_path.iterdir())
