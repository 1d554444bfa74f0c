"""The small process between the controller and one child: it ends the child's whole tree when it has to.

    python -I -S guard.py CONTROLLER_PID SHM_PREFIX CWD PROGRAM [ARGUMENT ...]      ("" where there is none)

What always holds: when this process has ended, by itself or because the controller is gone (also by SIGKILL), nothing
that its child started is left, whatever session it is in and whatever signals it ignores; and the files of the child
in /dev/shm are removed. Only the standard library is loaded, nothing of the environment's site-packages.

File descriptor 3 is a socket to the controller. Lines to the guard: `stop SECONDS` (SIGTERM to the child; after so
many seconds everything is killed). Lines from it: `started PID`, or `failed REASON`; at the end `exited CODE`
(negative: the signal). The socket closed on the other side: the controller is gone; SIGTERM to all, then SIGKILL.
Descriptors 1 and 2 are the child's output file, where the guard writes too when something is out of the ordinary.
"""

import contextlib
import os
import select
import signal
import sys
import time

if __name__ == "__main__":  # started by path, without site-packages: make this package importable
    sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from areal_async import process_tree

CONTROL_FD = 3
ORPHAN_GRACE_S = 2.0  # between SIGTERM and SIGKILL when the controller is gone; all must be over within 8 s
LEFTOVER_GRACE_S = 1.0  # the same, for what a child that has ended left behind
KILL_LIMIT_S = 5.0  # what SIGKILL doesn't end in this time hangs in the kernel (a driver); nobody can end it
POLL_S = 0.01  # between looks at a tree that is ending
SHM_FOLDER = "/dev/shm"
# Made by multiprocessing (vLLM's message queues), its semaphores, torch and NCCL; otherwise removed by their makers
SHM_FOREIGN = ("psm_", "sem.", "torch_", "nccl-")


def main(arguments: list[str]) -> int:
    controller, shm_prefix, cwd, scratch, *command = arguments
    os.set_inheritable(CONTROL_FD, False)
    os.closerange(CONTROL_FD + 1, 1 << 20)  # whatever the controller's libraries left open
    process_tree.become_subreaper()
    wakeups = _catch_signals()
    controller_fd = _watch(int(controller))
    try:
        child = _start(command, cwd)
    except OSError as error:
        _tell(f"failed {error.strerror}: {error.filename}")
        return 127
    _tell(f"started {child}")
    shared: set[str] = set()
    exit_code, grace_s = _guard(child, controller_fd, wakeups, shared)
    shared |= _shared_files(process_tree.descendants(os.getpid()))
    exit_code = _end_tree(child, exit_code, grace_s)
    _remove_shared_files(shared, shm_prefix)
    if scratch and select.select([controller_fd], [], [], 0)[0]:  # the controller is gone, and did not remove it
        _remove_folder(scratch)
    _tell(f"exited {exit_code}")
    return exit_code if exit_code >= 0 else 128 - exit_code


def _catch_signals() -> int:
    """A descriptor that becomes readable with a byte for each signal: SIGCHLD, or a request to end."""
    reader, writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    for number in (signal.SIGINT, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)  # Ctrl-C is for the controller, which decides
    return reader


def _watch(controller: int) -> int:
    """A descriptor that becomes readable when the controller ends.

    Beside the socket, since a process that the controller forked without exec holds a copy of the socket's other end.
    """
    try:
        descriptor = os.pidfd_open(controller)
    except ProcessLookupError:
        sys.exit(1)
    if os.getppid() != controller:
        sys.exit(1)
    return descriptor


def _start(command: list[str], cwd: str) -> int:
    """Fork and exec, as `subprocess` does it, in a session of its own; OSError if that can't be done."""
    reader, writer = os.pipe()
    guard = os.getpid()
    child = os.fork()
    if child == 0:
        _exec(command, cwd, guard, writer)
    os.close(writer)
    with open(reader, "rb") as file:
        failure = file.read().decode(errors="replace")
    if failure:
        os.waitpid(child, 0)
        number, _, what = failure.partition(" ")
        raise OSError(int(number), os.strerror(int(number)), what)
    return child


def _exec(command: list[str], cwd: str, guard: int, writer: int) -> None:
    what = command[0]
    try:
        process_tree.die_with_parent(guard)  # should the guard itself be killed
        os.setsid()
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)  # what is ignored stays ignored over an exec
        if cwd:
            what = cwd
            os.chdir(cwd)
            what = command[0]
        os.execvp(command[0], command)
    except OSError as error:
        os.write(writer, f"{error.errno} {what}".encode(errors="replace"))
    finally:
        os._exit(127)


def _guard(child: int, controller_fd: int, wakeups: int, shared: set[str]) -> tuple[int | None, float]:
    """Wait until the tree must end; the child's exit code if it has one, and the grace (s) for what is left.

    Into `shared` go the names of the tree's shared memory, read before it is asked to end: afterwards nobody knows.
    """
    poll = select.poll()
    for descriptor in (CONTROL_FD, controller_fd, wakeups):
        poll.register(descriptor, select.POLLIN)
    deadline = None
    while True:
        left_s = None if deadline is None else deadline - time.monotonic()
        if left_s is not None and left_s <= 0:
            return None, 0.0
        ready = {descriptor for descriptor, _ in poll.poll(None if left_s is None else left_s * 1000)}
        if wakeups in ready:
            received = os.read(wakeups, 4096)
            exit_code = _reap(child)
            if exit_code is not None:
                return exit_code, LEFTOVER_GRACE_S
            if signal.SIGTERM in received or signal.SIGHUP in received:
                return None, ORPHAN_GRACE_S
        if controller_fd in ready:
            return None, ORPHAN_GRACE_S
        if CONTROL_FD in ready:
            grace_s = _stop_requested()
            if grace_s is None:
                return None, ORPHAN_GRACE_S
            shared |= _shared_files(process_tree.descendants(os.getpid()))
            process_tree.signal_all([child], signal.SIGTERM)  # it knows best in which order to end what it started
            deadline = time.monotonic() + grace_s


def _stop_requested() -> float | None:
    """The grace of the `stop` line; None if the controller's end is closed."""
    try:
        received = os.read(CONTROL_FD, 4096)
    except ConnectionError:
        return None
    return float(received.split()[-1]) if received else None


def _reap(child: int) -> int | None:
    """Collect all that has ended; the child's exit code if it is among them."""
    exit_code = None
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0] != 0:
            if ended[0] == child:
                exit_code = os.waitstatus_to_exitcode(ended[1])
    return exit_code


def _end_tree(child: int, exit_code: int | None, grace_s: float) -> int:
    """SIGTERM to every descendant; after the grace SIGKILL, until none is left. The child's exit code."""
    own = os.getpid()
    if grace_s > 0:
        process_tree.signal_all(process_tree.descendants(own), signal.SIGTERM)
    kill_at = time.monotonic() + grace_s
    while not _childless():
        reaped = _reap(child)
        exit_code = exit_code if reaped is None else reaped
        now = time.monotonic()
        if now > kill_at + KILL_LIMIT_S:
            print(f"guard: {process_tree.descendants(own)} don't end by SIGKILL; left alone", file=sys.stderr)
            break
        if now >= kill_at:
            process_tree.signal_all(process_tree.descendants(own), signal.SIGKILL)
        time.sleep(POLL_S)
    return -signal.SIGKILL if exit_code is None else exit_code


def _childless() -> bool:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return True
    return False


def _shared_files(pids: list[int]) -> set[str]:
    """Names in /dev/shm of the kinds in `SHM_FOREIGN` that these processes have mapped and no other process has.

    Found by inode: glibc maps a semaphore under another name than the one that stays.
    """
    theirs = set().union(*map(_mapped, pids)) if pids else set()
    if not theirs:
        return set()
    tree = {*pids, os.getpid()}
    others = (int(entry) for entry in os.listdir("/proc") if entry.isdigit() and int(entry) not in tree)
    theirs.difference_update(*map(_mapped, others))
    device = os.stat(SHM_FOLDER).st_dev
    with os.scandir(SHM_FOLDER) as entries:
        ours = {entry.name: (device, entry.inode()) for entry in entries if entry.name.startswith(SHM_FOREIGN)}
    return {name for name, file in ours.items() if file in theirs}


def _mapped(pid: int) -> set[tuple[int, int]]:
    """Device and inode of files in /dev/shm that the process has mapped: a container's /dev/shm is another device, with
    the same inodes."""
    folder = f" {SHM_FOLDER}/".encode()
    files: set[tuple[int, int]] = set()
    with contextlib.suppress(OSError), open(f"/proc/{pid}/maps", "rb") as file:
        for line in file:
            if folder in line:
                device, inode = line.split(maxsplit=5)[3:5]
                major, minor = (int(part, 16) for part in device.split(b":"))
                files.add((os.makedev(major, minor), int(inode)))
    return files


def _remove_shared_files(names: set[str], prefix: str) -> None:
    """Those, and every file, or folder of files, whose name is the prefix, or goes on after it with a sign that is no
    letter or digit.

    A prefix with a folder of its own, such as /mnt/weights/areal-1a2b, means files in that folder.
    """
    folder, prefix = os.path.split(os.path.join(SHM_FOLDER, prefix))
    found = {f"{SHM_FOLDER}/{name}" for name in names}
    with contextlib.suppress(OSError):
        for name in os.listdir(folder) if prefix else ():
            rest = name.lstrip(".").removeprefix(prefix)
            if rest != name.lstrip(".") and not rest[:1].isalnum():
                found.add(f"{folder}/{name}")
    for path in found:
        try:
            os.unlink(path)
        except IsADirectoryError:
            _remove_folder(path)
        except OSError:
            continue


def _remove_folder(folder: str) -> None:
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            try:
                os.unlink(f"{folder}/{name}")
            except IsADirectoryError:
                _remove_folder(f"{folder}/{name}")
            except OSError:
                continue
        os.rmdir(folder)


def _tell(line: str) -> None:
    with contextlib.suppress(OSError):  # the controller is gone: nobody to tell
        os.write(CONTROL_FD, f"{line}\n".encode(errors="replace"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
