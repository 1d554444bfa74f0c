"""`make test` brings Chromium and bubblewrap: whatever the machine is like, that has an end, and one line says why.

The programs that the scripts call are made up here, in a folder that is all of PATH.
"""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TRUE_ONES = ("sh", "chmod", "dirname", "grep", "head", "mktemp", "rm", "tail", "timeout", "touch", "wc")
SHOWS = "echo '<html><p>a page</p></html>'"
PROGRAMS = {"chromium": ("chromium", SHOWS), "bubblewrap": ("bwrap", "exit 0")}
LOCKED = "echo 'E: Could not get lock /var/lib/dpkg/lock-frontend. It is held by process 7 (apt)'; exit 100"
NO_NETWORK = "case \"$*\" in *update*) ;; *) echo 'E: Unable to locate package'; exit 100;; esac"

Ran = subprocess.CompletedProcess[str]
Bring = Callable[..., Ran]


@pytest.fixture
def bring(tmp_path: Path) -> Bring:
    """bring("chromium", ci="1", chromium="echo x"): the script, where there are these programs and no others."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in TRUE_ONES:
        (folder / name).symlink_to(next(path for path in (Path("/usr/bin", name), Path("/bin", name)) if path.exists()))

    def run(what: str, ci: str = "", **programs: str) -> Ran:
        for name, text in {"id": "echo 0", "sleep": "echo >> slept", "fc-list": "echo a font", **programs}.items():
            path = folder / name.replace("_", "-")
            path.write_text(f"#!/bin/sh\n{text}\n")
            path.chmod(0o755)
        env = {"PATH": str(folder), "CI": ci, "TMPDIR": str(tmp_path)}
        script = ROOT / "tools" / f"bring_{what}.sh"
        return subprocess.run([script], cwd=folder, env=env, capture_output=True, text=True, timeout=60)

    return run


def installing(what: str) -> str:
    """An apt-get that brings it."""
    name, text = PROGRAMS[what]
    return f'case "$*" in *install*) printf "%s\\n" "#!/bin/sh" "{text}" > {name}; chmod 755 {name};; esac'


@pytest.mark.parametrize("what", PROGRAMS)
def test_nothing_is_asked_where_it_is_there(bring: Bring, tmp_path: Path, what: str) -> None:
    name, text = PROGRAMS[what]
    ran = bring(what, apt_get="touch asked", **{name: text})
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")
    assert not (tmp_path / "bin" / "asked").exists()


@pytest.mark.parametrize("what", PROGRAMS)
def test_it_is_installed_where_it_may_be(bring: Bring, what: str) -> None:
    ran = bring(what, apt_get=installing(what))
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout.startswith("installing with apt-get: ")


def test_another_that_uses_apt_is_waited_for(bring: Bring, tmp_path: Path) -> None:
    """It lets go at the third look."""
    ran = bring(
        "chromium",
        apt_get=f"test -e slept && test $(wc -l < slept) -ge 3 || {{ {LOCKED}; }}\n{installing('chromium')}",
    )
    assert (ran.returncode, ran.stderr) == (0, "another program uses apt; waiting for it\n")
    assert len((tmp_path / "bin" / "slept").read_text()) == 3


@pytest.mark.parametrize(
    ("programs", "why"),
    [
        ({"apt_get": LOCKED}, "apt-get install: E: Could not get lock /var/lib/dpkg/lock-frontend. It is held by"),
        ({"apt_get": NO_NETWORK}, "apt-get install: E: Unable to locate package"),
        ({"apt_get": "exit 124"}, "apt-get install: it took longer than 1200 s"),
        ({"apt_get": "exit 0", "id": "echo 1000"}, "only root may"),
        ({}, "there is no apt-get"),
    ],
)
@pytest.mark.parametrize("what", PROGRAMS)
@pytest.mark.slow
def test_where_it_can_not_be_installed_a_line_says_why(
    bring: Bring, what: str, programs: dict[str, str], why: str
) -> None:
    ran = bring(what, ci="1", **programs)
    assert ran.returncode == 1
    (line,) = [line for line in ran.stderr.splitlines() if "can't be installed" in line]
    assert why in line
    elsewhere = bring(what, **programs)
    if what == "chromium":  # what model-written code is tested in has to be there
        assert (elsewhere.returncode, elsewhere.stderr.splitlines()[-1][:37]) == (
            0,
            "The tests that need them are left out",
        )
    else:
        assert elsewhere.returncode == 1


@pytest.mark.slow
def test_one_that_is_there_and_does_not_work_is_told(bring: Bring) -> None:
    for text, why in (("echo 'no usable sandbox' >&2", "no usable sandbox"), (SHOWS, "there is no font")):
        ran = bring("chromium", ci="1", chromium=text, fc_list="true", apt_get="exit 0")
        assert ran.returncode == 1
        assert f"don't work here: {why}\n" in ran.stderr
