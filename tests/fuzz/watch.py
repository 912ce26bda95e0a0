"""What may not happen while a damaged file is read: another error than ours, a hang, a file elsewhere.

Python tells its audit hooks of every file that is opened, made, renamed or removed, so nothing has to be replaced.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import sysconfig
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from mergepipe.errors import InternalError, MergepipeError

SECONDS = 10.0
"""More than that is a hang; what is read here is small, and takes milliseconds."""
_PATHS = {
    "open": (0,), "os.mkdir": (0,), "os.rename": (0, 1), "os.remove": (0,), "os.rmdir": (0,), "os.link": (0, 1),
    "os.symlink": (1,), "os.chmod": (0,), "os.truncate": (0,), "os.listdir": (0,), "os.scandir": (0,),
    "sqlite3.connect": (0,), "shutil.rmtree": (0,),
}  # fmt: skip
_NEVER = (
    "subprocess.Popen",
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "pickle.find_class",
    "socket.connect",
    "marshal.loads",
)
# What the interpreter itself may read, to import what is imported late.
_LIBRARIES = tuple({os.path.realpath(path) for path in (
    *sysconfig.get_paths().values(), sys.prefix, sys.base_prefix, Path(__file__).parents[2] / "mergepipe",
)})  # fmt: skip
_SYSTEM = ("/dev/null", "/dev/urandom", "/proc/", "/sys/")


class BrokenPromiseError(AssertionError):
    """Something happened that no input may cause."""


class _Hang(BaseException):
    pass


class Watch:
    """Watches this process; one of them, as hooks stay until it ends."""

    def __init__(self) -> None:
        self._roots: tuple[str, ...] = ()
        self._broken: list[str] = []
        self._active = False
        sys.addaudithook(self._hear)

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self._active:
            return
        if event in _NEVER and not (event == "marshal.loads" and _importing()):
            self._broken.append(f"{event} {arguments!r:.200}")
        for number in _PATHS.get(event, ()):
            path = arguments[number]
            if isinstance(path, str | bytes | os.PathLike):
                self._check(event, os.fsdecode(path), arguments)

    def _check(self, event: str, path: str, arguments: tuple[Any, ...]) -> None:
        real = os.path.realpath(path)
        reads = event in ("os.listdir", "os.scandir") or (event == "open" and not _writes(arguments))
        allowed = self._roots + ((*_LIBRARIES, *_SYSTEM) if reads else ("/dev/null",))
        if reads and _importing():
            return
        if not any(real == root or real.startswith(os.path.join(root, "")) for root in allowed):
            self._broken.append(f"{event} {path!r} ({real})")

    @contextlib.contextmanager
    def over(self, *roots: Path) -> Iterator[None]:
        """Fail for whatever happens outside of these folders."""
        self._roots, self._broken = tuple(os.path.realpath(root) for root in roots), []
        self._active = True
        try:
            yield
        finally:
            self._active = False
        if self._broken:
            raise BrokenPromiseError("; ".join(self._broken[:5]))


def _importing() -> bool:
    frame = sys._getframe()
    while frame is not None:
        if "importlib" in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False


def _writes(arguments: tuple[Any, ...]) -> bool:
    mode, flags = arguments[1], arguments[2]
    if isinstance(mode, str):
        return any(letter in mode for letter in "wax+")
    return bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))


WATCH = Watch()


def outcome(action: Callable[[], object], *roots: Path) -> str:
    """Run an action in the first of some folders; return ``read``, or the kind of the error of ours that it ended with.

    Raises
    ------
    BrokenPromiseError
        For any other end, for taking too long, and for what happened outside of the folders.
    """
    # There, because a hook is told a name alone where a file is reached from an open folder.
    with contextlib.chdir(roots[0]), warnings.catch_warnings(), WATCH.over(*roots), _limited():
        warnings.simplefilter("error")  # a warning of Python's own would stand on the user's terminal
        try:
            action()
        except InternalError as error:
            raise BrokenPromiseError(f"internal error: {error}") from error
        except MergepipeError as error:
            _check_error(error)
            return error.kind()
        except _Hang:
            raise BrokenPromiseError(f"took more than {SECONDS} s") from None
        except Exception as error:
            raise BrokenPromiseError(f"{type(error).__name__}: {error}") from error
    return "read"


def _check_error(error: MergepipeError) -> None:
    import json

    if error.exit_status not in (1, 2, 3) or not error.message.strip():
        raise BrokenPromiseError(f"exit status {error.exit_status}, message {error.message!r}")
    json.dumps(error.as_json(), default=str)
    if len(error.message) > 200_000:
        raise BrokenPromiseError(f"a message of {len(error.message)} characters")


@contextlib.contextmanager
def _limited() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: object) -> None:
        raise _Hang

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
