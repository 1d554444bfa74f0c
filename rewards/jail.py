"""What holds code that a model wrote: bubblewrap's namespaces, and what to do where they can't be had.

`command` says what to execute so that a program runs in the jail; `layers` what is really on on this machine.

What always holds in the jail: no network but an empty one, no process but its own, no environment but `ENVIRONMENT`;
of the host's files only programs and libraries, read-only; one small writable folder, `/tmp`, that vanishes with it; no
capability, no further user namespace, nothing gained by a setuid program; when its first process is killed, the
kernel kills the rest. It is no virtual machine: the kernel's system calls are all there.
"""

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec

from areal_async.errors import RewardError
from areal_async.messages import RewardOptions
from areal_async.rewards import cgroups

PROGRAM: Final = "bwrap"
ENVIRONMENT: Final = {
    "PATH": "/usr/bin:/bin",
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "PYTHONUTF8": "1",
    "PYTHONHASHSEED": "0",  # sets of strings in the same order each time: the same verdict each time
}
NOBODY: Final = "65534"
TRIAL_S: Final = 10.0  # it takes 20 ms; a machine under load takes longer
SYSTEM: Final = ("/usr/bin", "/usr/lib", "/usr/lib32", "/usr/lib64", "/usr/libexec", "/usr/share")
"""Not all of /usr: in containers, /usr/src and /usr/local hold people's projects."""
LINKED: Final = ("/bin", "/lib", "/lib32", "/lib64")  # links into /usr, folders of their own on old systems
CONFIGURED: Final = ("/etc/ld.so.cache", "/etc/alternatives")  # where the linker finds libraries

PACKAGES: Final = "/packages"
"""In the jail: by their own paths they would say where people's projects are, and be hidden if that is under /tmp."""

INSTALL: Final = {
    "debian": "apt-get install bubblewrap",
    "ubuntu": "apt-get install bubblewrap",
    "fedora": "dnf install bubblewrap",
    "rhel": "dnf install bubblewrap",
    "arch": "pacman -S bubblewrap",
    "suse": "zypper install bubblewrap",
}


class Protection(msgspec.Struct, frozen=True):
    """A layer between a check and the machine. why: what it does; where it is off, why, and what to do about it."""

    name: str
    on: bool
    why: str


def command(argv: Sequence[str], options: RewardOptions) -> list[str]:
    """What to execute so that `argv` runs in the layers that `options.sandbox` asks for."""
    if options.sandbox == "rlimits":
        return list(argv)
    size = str(options.limits.file_mib << 20)
    return [
        PROGRAM,
        # argv is the jail's first process: what is in there can't kill or stop it, and none of bubblewrap's remains
        # (whose environment could be read in /proc, --clearenv or not)
        "--unshare-all", "--unshare-user", "--as-pid-1", "--disable-userns", "--cap-drop", "ALL",
        "--uid", NOBODY, "--gid", NOBODY, "--hostname", "jail",
        "--die-with-parent", "--new-session",
        "--clearenv", *_each("--setenv", ENVIRONMENT.items()),
        *_files(),
        # Read-only: where root runs this, the kernel would let it change settings in /proc/sys, namespaces or not
        "--proc", "/proc", "--remount-ro", "/proc",
        "--dev", "/dev", "--size", size, "--tmpfs", "/dev/shm", "--remount-ro", "/dev",
        "--size", size, "--tmpfs", "/tmp", "--chdir", "/tmp",
        *_python(),  # after /tmp, under which it may lie
        "--remount-ro", "/",
        "--", *argv,
    ]  # fmt: skip


def interpreter() -> str:
    """The Python that runs this, by the path that it has in the jail, too: no virtual environment's link."""
    return os.path.realpath(sys.executable)


def packages(options: RewardOptions) -> list[str]:
    """Folders of installed packages, by the paths that they have where `command` runs, for `sys.path`."""
    if options.sandbox == "rlimits":
        return _installed()
    return [f"{PACKAGES}/{number}" for number in range(len(_installed()))]


def _installed() -> list[str]:
    folders = [os.path.realpath(path) for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    return [folder for folder in dict.fromkeys(folders) if os.path.isdir(folder)]


def layers(options: RewardOptions) -> list[Protection]:
    """Which layers are on, for checks of these options on this machine. Takes about 20 ms: it tries the jail."""
    found = [
        Protection("own session", True, "a check is killed with all it started, at its deadline and when it ends"),
        Protection("rlimits", True, "memory, open files and file sizes; processes and the memory of all are watched"),
        _cgroup(),
    ]
    if options.sandbox == "rlimits":
        why = "reward.sandbox is rlimits: model-written code has this user's files, network and processes"
        return [*found, Protection("bubblewrap", False, why)]
    trouble = _trouble(options)
    good = "model-written code has no network, no process, no file but its own"
    return [*found, Protection("bubblewrap", not trouble, trouble or good)]


def require(options: RewardOptions) -> None:
    """RewardError where the jail that `options.sandbox` asks for can't be had on this machine."""
    if options.sandbox == "bubblewrap" and (trouble := _trouble(options)):
        raise RewardError(
            f"reward.sandbox is bubblewrap, and it can't be used here: {trouble}\n"
            "Knowingly without it: reward.sandbox=rlimits, which protects from accidents, not from an attacker"
        )


def _cgroup() -> Protection:
    folder = cgroups.parent()
    if folder is not None:
        return Protection("cgroup", True, f"the kernel bounds the processes of a check, in {folder}")
    why = (
        "no folder of control groups may be written here; most can leave it: a fork bomb is then found by looking. "
        "For groups: run as root on the machine itself, in a container that mounts /sys/fs/cgroup to be written, or "
        "under `systemd-run --user --scope -p Delegate=yes`"
    )
    return Protection("cgroup", False, why)


def _files() -> Iterator[str]:
    for path in SYSTEM:
        yield from _bound(path)
    for path in LINKED:
        if os.path.islink(path):
            yield from ("--symlink", os.readlink(path), path)
        else:
            yield from _bound(path)
    for number, path in enumerate(_installed()):
        yield from ("--ro-bind", path, f"{PACKAGES}/{number}")
    for path in CONFIGURED:
        yield from ("--ro-bind-try", path, path)


def _python() -> Iterator[str]:
    base = os.path.realpath(sys.base_prefix)
    for path in (f"{base}/bin", f"{base}/lib", f"{base}/lib64"):
        if not any(path == bound or path.startswith(f"{bound}/") for bound in SYSTEM):
            yield from _bound(path)


def _bound(path: str) -> Iterator[str]:
    if os.path.isdir(path):
        yield from ("--ro-bind", path, path)


def _each(option: str, pairs: Iterable[tuple[str, str]]) -> Iterator[str]:
    for name, value in pairs:
        yield from (option, name, value)


def _trouble(options: RewardOptions) -> str:
    """Why the jail doesn't work here and what to do; "" if it does. A trial, since namespaces may be forbidden."""
    if shutil.which(PROGRAM) is None:
        return f"there is no `{PROGRAM}`; install it: {_install()}"
    argv = command([interpreter(), "-I", "-S", "-c", "pass"], options)
    try:
        tried = subprocess.run(argv, capture_output=True, stdin=subprocess.DEVNULL, timeout=TRIAL_S, check=False)
    except subprocess.TimeoutExpired:
        return f"`{PROGRAM}` did not come back within {TRIAL_S:g} s"
    if tried.returncode == 0:
        return ""
    said = tried.stderr.decode(errors="replace").strip() or f"exit code {tried.returncode}"
    return f"`{PROGRAM}` says: {said}; {_remedy(said)}"


def _install() -> str:
    release = platform.freedesktop_os_release() if os.path.exists("/etc/os-release") else {}
    for name in (release.get("ID", ""), *release.get("ID_LIKE", "").split()):
        if name in INSTALL:
            return INSTALL[name]
    return "the package is called bubblewrap"


def _remedy(said: str) -> str:
    if "Unknown option" in said:
        return "it is older than 0.8.0, which is needed: install a newer one"
    if reason := _forbidden():
        return reason
    if "namespace" in said or "Operation not permitted" in said or "Permission denied" in said:
        return (
            "namespaces are forbidden here, as in most containers: start the container with --privileged, or with "
            "--security-opt seccomp=unconfined --security-opt apparmor=unconfined --security-opt systempaths=unconfined"
        )
    return f"try it: {PROGRAM} --unshare-all --ro-bind / / true"


def _forbidden() -> str:
    """Which setting of the kernel forbids user namespaces, and how to change it; "" if none."""
    for setting, forbidding in (
        ("kernel.unprivileged_userns_clone", "0"),
        ("kernel.apparmor_restrict_unprivileged_userns", "1"),
        ("user.max_user_namespaces", "0"),
    ):
        file = Path("/proc/sys", setting.replace(".", "/"))
        if file.exists() and file.read_text().strip() == forbidding:
            wanted = {"0": "1", "1": "0"}[forbidding] if "max" not in setting else "10000"
            return f"the kernel's {setting} is {forbidding}: `sysctl -w {setting}={wanted}` as root"
    return ""
