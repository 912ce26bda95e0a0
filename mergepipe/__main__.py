"""Run the command line: ``mergepipe``, and ``python -m mergepipe``.

Nothing is imported before `main` runs, so that Ctrl-C ends in words at any moment: while the command line is imported,
too, and while Python cleans up after it.
"""

import gc
import os
import sys
from typing import NoReturn

INTERRUPTED = 130
# Objects that are made until Python looks for cycles among them. There are few cycles, and a large model's plan has
# millions of objects, which it would look through again and again: a fifth of the time.
_COLLECT_EVERY = 100_000
# Builds have a process for each core. The threads that numpy's OpenBLAS begins with it would only wait, and busily: a
# fiftieth of a build's time on two cores.
_BLAS_THREADS = "OPENBLAS_NUM_THREADS"


def main() -> NoReturn:
    """Run the command line with the arguments of the process, and exit."""
    gc.set_threshold(_COLLECT_EVERY, 50, 100)
    os.environ.setdefault(_BLAS_THREADS, "1")
    try:
        from mergepipe.cli.main import main as run_command_line

        run_command_line()
    except KeyboardInterrupt:
        _end_in_peace()
        _say_interrupted(as_json="--json" in sys.argv)
        sys.exit(INTERRUPTED)
    finally:
        _end_in_peace()
        gc.freeze()  # Python looks for cycles as it exits, and a large plan has none: a tenth of the time of `status`


def _say_interrupted(*, as_json: bool) -> None:
    """Say it as `mergepipe.cli.console` does, which may not be there."""
    text = (
        '{"error": {"kind": "cancelled", "message": "interrupted", "hint": null}}' if as_json else "error: interrupted"
    )
    if sys.stderr is not None:
        sys.stderr.write(text + "\n")


def _end_in_peace() -> None:
    """Let Ctrl-C change nothing any more: the command has ended, and its exit code stands.

    Where threads are left, which Python waits for, it can still end the process.
    """
    import signal
    import threading

    if threading.active_count() == 1:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


if __name__ == "__main__":
    main()
