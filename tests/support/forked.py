"""Command lines in processes forked from one that has imported mergepipe already.

Importing takes several times longer than a small build. A fork server imports once and forks a process for each
command line: a real process, that can be killed at any moment, at a tenth of the price.

The server gives up root's right to ignore file modes, so that tests that run as root see what a user would see. Its
processes do not flush to the disk: what a killed process wrote is there all the same, and only a power cut would tell.
That and in which order they flush is seen where the calls are counted (`support.faults`).
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, NoReturn

from support.cli import Result, clean_environment, hear_signals
from support.projects import quicken

_TESTS = Path(__file__).resolve().parents[1]
_MESSAGE = 1 << 16
TIMEOUT = 300.0
"""Seconds that anything here is waited for; what takes longer stands still, and a failure says where."""


# --- the side of the tests ----------------------------------------------------------------------------------------


@dataclass(slots=True)
class Forked:
    """A command line that runs, or ran, in a process of its own."""

    pid: int
    what: str
    started: float
    status: IO[bytes]
    stdout: IO[bytes]
    stderr: IO[bytes]

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        """Send it a signal; a process that is gone is left alone."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def wait(self, timeout: float = TIMEOUT) -> Result:
        """Wait for its end and return what it left.

        Raises
        ------
        TimeoutError
            If it does not end within ``timeout`` seconds; it is killed then.
        RuntimeError
            If the server ended before it.
        """
        code, where = None, ""
        try:
            code = _next_number(self.status, timeout)
        except TimeoutError:
            where = _sleeping_in(self.pid)
            self.kill()
        finally:
            seconds = time.perf_counter() - self.started
            stdout, stderr = self._texts()
        if code is None:
            raise TimeoutError(
                f"`{self.what}` (process {self.pid}) did not end within {timeout} s; {where}; it said:\n"
                f"{stdout}{stderr}"
            )
        return Result(stdout=stdout, stderr=stderr, code=code, seconds=seconds)

    def _texts(self) -> list[str]:
        """Return both streams; nothing can be waited for afterwards."""
        texts = []
        for file in (self.stdout, self.stderr):
            file.seek(0)
            texts.append(file.read().decode("utf-8", "replace"))
            file.close()
        self.status.close()
        return texts


def _next_number(status: IO[bytes], timeout: float) -> int:
    """Return the number on the next line of a pipe without a buffer.

    Raises
    ------
    TimeoutError
        If no line comes within ``timeout`` seconds.
    RuntimeError
        If none can come any more.
    """
    ready = select.poll()
    ready.register(status, select.POLLIN)
    if not ready.poll(timeout * 1000):
        raise TimeoutError(f"no word from the fork server within {timeout} s")
    line = status.readline()  # lines are written at once
    if not line:
        raise RuntimeError("the process that minds a command line was killed")
    return int(line)


def _sleeping_in(pid: int) -> str:
    """Return what the kernel says of a process that should have ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
        where = Path(f"/proc/{pid}/wchan").read_text(encoding="ascii")
    except OSError:
        return "nothing is known of it"
    kept = [line.replace("\t", " ") for line in status.splitlines() if line.startswith(("State", "Threads", "Sig"))]
    return f"waits in {where}, {', '.join(kept)}"


class ForkServer:
    """A process that forks command lines of mergepipe. Use as a context.

    Parameters
    ----------
    wrapper
        The start of a command line that the server is started through, such as ``unshare -rm``.
    env
        Further environment of the server, and so of everything that it forks.
    flush
        Whether its processes ask the system to flush files to the disk.
    """

    def __init__(
        self, wrapper: Sequence[str] = (), env: Mapping[str, str] | None = None, *, flush: bool = False
    ) -> None:
        self._elsewhere = bool(wrapper)
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(TIMEOUT)
        argv = [*wrapper, sys.executable, "-m", "support.forked", str(theirs.fileno()), *(["flush"] if flush else [])]
        paths = os.pathsep.join([str(_TESTS), str(_TESTS.parent)])
        environment = clean_environment({"PYTHONPATH": paths, "OPENBLAS_NUM_THREADS": "1", **(env or {})})
        self._process = subprocess.Popen(
            argv, env=environment, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, start_new_session=True
        )
        theirs.close()
        self.pid = int(self._socket.recv(_MESSAGE) or -1)
        if self.pid < 0:
            raise RuntimeError(f"the fork server did not start: exit code {self._process.wait()}")

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(self, *exc: object) -> None:
        self._socket.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # with what it forked that a failed test did not wait for
        self._process.wait(TIMEOUT)

    def view(self, path: Path) -> Path:
        """Return the path under which we see a path of the server's, which may have mounts of its own."""
        if not self._elsewhere:
            return path
        return Path(f"/proc/{self.pid}/root") / path.relative_to("/")

    def start(
        self, args: Sequence[str], cwd: Path, env: Mapping[str, str] | None = None, *, prelude: str = ""
    ) -> Forked:
        """Start ``mergepipe ARGS`` in ``cwd``.

        Parameters
        ----------
        env
            Added to the server's environment.
        prelude
            Python code that the process runs first.
        """
        what = " ".join(["mergepipe", *args])
        return self._send(what, {"args": list(args), "cwd": str(cwd), "env": dict(env or {}), "prelude": prelude})

    def run(self, args: Sequence[str], cwd: Path, env: Mapping[str, str] | None = None, *, prelude: str = "") -> Result:
        """Run ``mergepipe ARGS`` in ``cwd`` to its end."""
        return self.start(args, cwd, env, prelude=prelude).wait()

    def execute(self, *argv: str) -> None:
        """Run another program where the server is, such as ``mount``; it must succeed."""
        result = self._send(" ".join(argv), {"argv": list(argv), "cwd": "/", "env": {}}).wait()
        if result.code != 0:
            raise RuntimeError(f"{' '.join(argv)} failed: {result.text}")

    def _send(self, what: str, request: Mapping[str, Any]) -> Forked:
        ours, theirs = os.pipe()
        stdout, stderr = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115 - closed by `wait`
        started = time.perf_counter()
        message = json.dumps(request).encode()
        socket.send_fds(self._socket, [message], [theirs, stdout.fileno(), stderr.fileno()])
        os.close(theirs)
        status = os.fdopen(ours, "rb", buffering=0)
        return Forked(_next_number(status, TIMEOUT), what, started, status, stdout, stderr)


# --- the server ---------------------------------------------------------------------------------------------------


def _serve(channel: socket.socket, *, flush: bool) -> None:
    hear_signals()
    _obey_file_modes()
    _import_everything()
    quicken(SimpleNamespace(setattr=setattr), flush=flush)
    gc.freeze()  # else a collection in a process would copy every page that it shares with this one
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the minders
    channel.send(str(os.getpid()).encode())
    while True:
        message, fds, _, _ = socket.recv_fds(channel, _MESSAGE, 3)
        if not message:
            return
        if os.fork() == 0:
            channel.close()
            _mind(json.loads(message), *fds)
        for fd in fds:
            os.close(fd)


def _mind(request: Mapping[str, Any], status: int, stdout: int, stderr: int) -> NoReturn:
    """Start the process, say its number, wait for its end, and say how it ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pid = os.fork()
    if pid == 0:
        os.close(status)
        _become(request, stdout, stderr)
    os.write(status, f"{pid}\n".encode())
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os.write(status, f"{code}\n".encode())
    os._exit(0)


def _become(request: Mapping[str, Any], stdout: int, stderr: int) -> NoReturn:
    code = 1
    try:
        os.dup2(stdout, 1)
        os.dup2(stderr, 2)
        os.closerange(3, 256)
        os.chdir(request["cwd"])
        os.environ.update(request["env"])
        if "argv" in request:
            os.execvp(request["argv"][0], request["argv"])
        exec(request["prelude"], {})
        from mergepipe.cli.main import run

        code = run(request["args"])
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        sys.excepthook(*sys.exc_info())
        sys.stderr.flush()
    finally:
        os._exit(code)


def _import_everything() -> None:
    """Import what a build would import when it comes to it, the operators included."""
    import mergepipe.cli.main
    import mergepipe.engine.run
    import mergepipe.project  # noqa: F401
    from mergepipe.operators.registry import signatures

    signatures()


# linux/capability.h: version 3 of the call; the rights to pass over the modes of files and directories.
_CAPABILITY_VERSION_3 = 0x20080522
_CAP_DAC_OVERRIDE, _CAP_DAC_READ_SEARCH = 1, 2


def _obey_file_modes() -> None:
    """Give up root's right to read and write whatever the modes say. Without that right nothing changes."""
    if os.geteuid() != 0 or not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    data = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable: low words, then high words
    if libc.capget(header, data) == 0:
        kept = ~(1 << _CAP_DAC_OVERRIDE | 1 << _CAP_DAC_READ_SEARCH)
        data[0] &= kept
        data[1] &= kept
        libc.capset(header, data)


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])), flush="flush" in sys.argv[2:])
