"""What runs in the jail: one interpreter a check, which forks a child for each test. `jailed.py` is its other end.

It is no module of the project but a program of its own: compiled there, sent over standard input, executed by a bare
`python -s -S -P -c BOOT FD`. So it imports nothing that costs time: `json` alone would double the cost of a check.

What always holds: the expected outputs never come here; tested code runs in a child with real pipes as descriptors 0, 1
and 2, as the program `__main__`, and ends as a Python program ends; nothing that it can do to this process makes a
wrong output right, since what is said here is only the child's exit code.

A child must touch little of what it shares with its parent: each page costs 3 µs. So the code is compiled once, before
the fork, and of the interpreter's shutdown only those parts are done that can be seen from outside (`_leave`).

Messages come over the socket FD, four bytes of length and then `marshal`: first (code, folders of packages, folders
that must be empty between tests), then for each test (function or "", arguments), with its descriptors: stdin, stdout,
stderr, and for results. The answers are lines: `ready`; for each test `run` by its process and, when that has ended,
`exit CODE FILES`, where FILES is 1 if the test left some; or `fork ERRNO` where there could be no process.
"""

from __future__ import annotations

import _json  # the C part of `json`, without the rest
import _sitebuiltins
import _socket
import atexit
import builtins
import gc
import importlib
import marshal
import os
import sys

TYPE_CHECKING = False  # `typing` would cost as much as the rest
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CodeType, ModuleType
    from typing import Any

LENGTH_BYTES = 4
DESCRIPTORS = 4
RECURSION_LIMIT = 50_000  # of functions that are called: LeetCode's is about that
FLUSH_FAILED = 120  # Python's exit code where the output could not be written
NAME = "solution.py"

PRELUDE = {
    "typing": "Any Callable DefaultDict Deque Dict FrozenSet Generator Generic Iterable Iterator List Mapping "
    "NamedTuple Optional Sequence Set Tuple Type TypeVar Union",
    "collections": "ChainMap Counter OrderedDict defaultdict deque namedtuple",
    "heapq": "heapify heappop heappush heappushpop heapreplace merge nlargest nsmallest",
    "bisect": "bisect_left bisect_right insort insort_left insort_right",
    "itertools": "accumulate chain combinations combinations_with_replacement compress count cycle dropwhile "
    "filterfalse groupby islice pairwise permutations product repeat starmap takewhile tee zip_longest",
    "functools": "cache cached_property cmp_to_key lru_cache partial reduce total_ordering wraps",
    "math": "ceil comb cos dist exp fabs factorial floor fmod gcd hypot inf isqrt lcm log log10 log2 nan perm pi prod "
    "radians sin sqrt tan trunc",
    "operator": "add and_ attrgetter itemgetter mul or_ sub truediv xor",
    "string": "ascii_letters ascii_lowercase ascii_uppercase digits punctuation",
    "copy": "deepcopy",
    "random": "choice randint shuffle",
    "datetime": "timedelta",
    "io": "BytesIO StringIO",
}
MODULES = (
    "bisect collections copy datetime decimal fractions functools heapq io itertools json math operator os random re "
    "statistics string sys time typing"
)
"""Names that call-based code may use without an import, as on LeetCode; only those that it uses are imported."""


def serve(descriptor: int) -> Callable[[], None]:
    """Take tests until the other end is closed. Returns in the children only, with what is left to be done there."""
    control = _socket.socket(fileno=descriptor)
    sys.set_int_max_str_digits(0)
    builtins.exit = _sitebuiltins.Quitter("exit", "Ctrl-D (i.e. EOF)")  # `site` isn't there to do it
    builtins.quit = _sitebuiltins.Quitter("quit", "Ctrl-D (i.e. EOF)")
    control.sendall(b"ready\n")
    (text, packages, watched), _ = _receive(control)
    sys.path += packages
    code = _compiled(text)
    gc.collect()
    gc.freeze()
    while True:
        (function, arguments), descriptors = _receive(control)
        try:
            pid = os.fork()
        except OSError as error:
            control.sendall(b"fork %d\n" % (error.errno or 0))
            pid = -1
        if pid == 0:
            control.sendall(b"run\n")
            control.close()
            os.setsid()  # a signal to its own group is for itself only
            for number, passed in enumerate(descriptors[:3]):
                os.dup2(passed, number)
                os.close(passed)
            return _program(code) if not function else _call(code, function, arguments, descriptors[3])
        for passed in descriptors:
            os.close(passed)
        if pid > 0:
            _, status = os.waitpid(pid, 0)
            _reap()
            left = any(os.listdir(folder) for folder in watched)
            control.sendall(b"exit %d %d\n" % (os.waitstatus_to_exitcode(status), left))


def _reap() -> None:
    """In a process namespace of its own this is the first process, which inherits what others leave behind."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def _receive(control: _socket.socket) -> tuple[Any, list[int]]:
    """The next message, and the descriptors that came with it; ends the process when there is none."""
    space = _socket.CMSG_SPACE(DESCRIPTORS * 4)
    head, extra, _, _ = control.recvmsg(LENGTH_BYTES, space)
    if len(head) < LENGTH_BYTES:
        os._exit(0)
    descriptors = [
        int.from_bytes(data[at : at + 4], sys.byteorder) for _, _, data in extra for at in range(0, len(data), 4)
    ]
    body = bytearray(int.from_bytes(head, "little"))
    space_left = memoryview(body)
    while space_left:
        received = control.recv_into(space_left)
        if not received:
            os._exit(0)
        space_left = space_left[received:]
    return marshal.loads(body), descriptors


# ------------------------------------------------------------------------------------------------ in the forked child


def _program(code: CodeType | BaseException) -> Callable[[], None]:
    def run() -> None:
        exec(_usable(code), _module("__main__").__dict__)

    return run


def _call(code: CodeType | BaseException, function: str, arguments: list[object], result: int) -> Callable[[], None]:
    encode = _json.make_encoder(
        {}, _plain, _json.encode_basestring_ascii, None, ":", ",", False, False, True
    )  # before the tested code runs, which may change anything
    write = os.write

    def run() -> None:
        module = _module("solution")  # what it does as `__main__` only is not asked for
        usable = _usable(code)
        _give(_names(usable), module.__dict__)
        sys.setrecursionlimit(RECURSION_LIMIT)
        try:
            exec(usable, module.__dict__)
        except EOFError:  # it reads an input that call-based tests don't have
            if _found(module, function) is None:
                raise
        called = _found(module, function)
        if called is None:
            raise SystemExit(f"there is no function {function!r}")
        record = "".join(encode(called(*arguments), 0)).encode()
        while record:
            record = record[write(result, record) :]

    return run


def _module(name: str) -> ModuleType:
    module = type(sys)(name)
    module.__dict__["__file__"] = NAME
    sys.modules[name] = module
    sys.argv = [NAME]
    return module


def _compiled(text: str) -> CodeType | BaseException:
    """The code, or why it is none, to be raised where it should run."""
    try:
        return compile(text, NAME, "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return error.with_traceback(None)


def _usable(code: CodeType | BaseException) -> CodeType:
    if isinstance(code, BaseException):
        raise code
    return code


def _names(compiled: CodeType) -> set[str]:
    names = set(compiled.co_names)
    for constant in compiled.co_consts:
        if isinstance(constant, type(compiled)):
            names |= _names(constant)
    return names


def _give(names: set[str], namespace: dict[str, object]) -> None:
    for source, given in PRELUDE.items():
        for name in names.intersection(given.split()):
            namespace[name] = getattr(importlib.import_module(source), name)
    for name in names.intersection(MODULES.split()):
        namespace[name] = importlib.import_module(name)


def _found(module: ModuleType, function: str) -> Callable[..., object] | None:
    """A method of `class Solution`, or else a function."""
    namespace: dict[str, Any] = module.__dict__
    solution = namespace.get("Solution")
    place: object = solution() if solution is not None and hasattr(solution, function) else None
    found: Callable[..., object] | None = namespace.get(function) if place is None else getattr(place, function)
    return found


def _plain(value: Any) -> object:
    """numpy's numbers and arrays as Python's; whatever else is no JSON is an error."""
    if type(value).__module__ == "numpy":
        plain: object = value.tolist()
        return plain
    raise TypeError(f"the function returned {type(value).__name__}, which can't be compared: {value!r:.100}")


def _end(run: Callable[[], None]) -> None:
    """Run it, and end the process as the interpreter ends after a program."""
    exit_code = 0
    try:
        run()
    except SystemExit as left:
        exit_code = left.code & 0xFF if isinstance(left.code, int) else int(left.code is not None)
        if not isinstance(left.code, int | None):
            print(left.code, file=sys.stderr)
    except BaseException as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename != NAME:
            trace = trace.tb_next  # the frames of this file say nothing
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        exit_code = 1
        del error, trace
    _leave(exit_code)


def _leave(
    exit_code: int,
    stdout: object = sys.stdout,
    run_exit_functions: Callable[[], None] = atexit._run_exitfuncs,
    collect: Callable[[], int] = gc.collect,
    leave: Callable[[int], None] = os._exit,
) -> None:
    """What Py_FinalizeEx does that can be seen: threads are waited for, `atexit` functions run, the program's objects
    end (files that were not closed are written), the streams are flushed. What is used is bound now: tested code may
    change any module."""
    if (threading := sys.modules.get("threading")) is not None:
        threading._shutdown()
    run_exit_functions()
    flushed = _flush(sys.stdout) and _flush(sys.stderr)
    for name in ("__main__", "solution"):
        if (module := sys.modules.get(name)) is not None:
            module.__dict__.clear()
    if gc.isenabled():
        collect()
    flushed &= _flush(stdout) and _flush(sys.stdout) and _flush(sys.stderr)
    leave(exit_code if flushed or exit_code else FLUSH_FAILED)


def _flush(stream: Any) -> bool:
    try:
        if stream is not None and not stream.closed:
            stream.flush()
    except BaseException:
        return False
    return True


if __name__ == "runner":
    _end(serve(int(sys.argv[1])))
