"""Running a user's command on the model of each budget of a sweep.

The models are built by the ordinary build, in a place of their own: a cache that starts with what the project's knows
of the sources, and an output directory beside it. Neither the project's cache nor its outputs nor its lock see any of
it. Both directories are removed in the end, whatever ends the sweep; what a killed one left, the next one removes.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shlex
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mergepipe.cache.database import copy_catalog
from mergepipe.cache.layout import CacheLayout
from mergepipe.errors import MergefileError, MergepipeError, fail_storage
from mergepipe.fsio.crash import crash_point
from mergepipe.fsio.durable import remove_tree
from mergepipe.lockfile.reader import read_lock
from mergepipe.mergefile.schema import Budget, Output
from mergepipe.project.session import Project
from mergepipe.project.sweep_budgets import budget_label
from mergepipe.values import dataclass

_PREFIX = ".mergepipe-sweep-"
_MODELS = "-models"  # behind the name of the cache; beside it, for an output must not lie in a cache
_PLACE = "{}"
_TAIL = 12  # lines of what a command said that an error shows
_WORDS = 3  # a longer name is a sentence
_NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?|[+-]?(?:nan|inf)", re.IGNORECASE)
_SEPARATORS = re.compile(r"[\s,;]+")


class EvaluationError(MergepipeError):
    """The command that evaluates models failed, or said nothing that can be understood."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command to run on a model: its words, and the directory that it runs in."""

    words: tuple[str, ...]
    directory: Path

    @classmethod
    def parse(cls, text: str, directory: Path) -> Command:
        """Return the command of a line as a shell would split it; nothing else of a shell is done.

        Raises
        ------
        MergefileError
            If it is empty, or a quotation does not end.
        """
        try:
            words = shlex.split(text)
        except ValueError as error:
            raise MergefileError(f"the command `{text}` cannot be split: {error}", got=text) from None
        if not words:
            raise MergefileError("the command is empty", hint="give one that takes the directory of a model", got=text)
        return cls(words=tuple(words), directory=directory)

    def on(self, model: Path) -> list[str]:
        """Return the words with the directory of a model in the place of ``{}``, else behind them."""
        if any(_PLACE in word for word in self.words):
            return [word.replace(_PLACE, str(model)) for word in self.words]
        return [*self.words, str(model)]


def evaluated(
    project: Project, output: Output, budgets: Sequence[Budget], command: Command
) -> dict[str, Mapping[str, float]]:
    """Build an output with each budget, run a command on it, and return its figures by the budget's label.

    Raises
    ------
    EvaluationError
        Naming the budget, if the command fails or gives no figures.
    """
    figures: dict[str, Mapping[str, float]] = {}
    with EvaluatedProject(project).workspace() as place:
        for budget in budgets:
            label = budget_label(budget)
            with place.built(output, budget) as model:
                place.say(f"running `{command.words[0]}` on the model of {label}")
                figures[label] = run_command(command, model, label)
    return figures


class EvaluatedProject(Project):
    """A project that builds the models of budgets in a place of its own."""

    def __init__(self, project: Project) -> None:
        self.__dict__.update(vars(project))

    def say(self, message: str) -> None:
        """Tell the user what goes on."""
        self._reporter.note(message)

    @contextlib.contextmanager
    def workspace(self) -> Iterator[EvaluatedProject]:
        """Have a cache of its own, with all that the project's knows of the sources, and remove it in the end."""
        # Beside the project's: there the catalog's relative paths mean the same, and there is room for models.
        with _temporary(self._layout.root.parent) as cache:
            with self._writing():
                copy_catalog(self._layout.catalog, CacheLayout(cache).catalog)
            self._layout = CacheLayout(cache)
            self.lock_path = _models(cache) / self.lock_path.name
            with self._writing() as (catalog, _):
                for name, _ in catalog.pack_names():
                    catalog.drop_pack(name)  # it lies in the other cache
            yield self

    @contextlib.contextmanager
    def built(self, output: Output, budget: Budget) -> Iterator[Path]:
        """Build an output with a budget; the model is gone afterwards."""
        model = self.lock_path.parent / output.name
        own = output.budget or budget
        given = replace(budget, stats=own.stats, precision=budget.precision or own.precision, coarse=own.coarse)
        changed = replace(output, budget=given, path=str(model), publish=True)
        # What it is made from is built as well, and not published either.
        others = {name: replace(other, publish=False) for name, other in self.mergefile.outputs.items()}
        self.mergefile = replace(self.mergefile, outputs={**others, output.name: changed})
        try:
            self.build([output.name])
            yield model
        finally:
            self._remove(output.name, model)

    def _remove(self, name: str, model: Path) -> None:
        """Remove a model and its packs, so that there is never more than one; stages stay for the next one."""
        remove_tree(model)
        lock = read_lock(self.lock_path)
        made = [output for output in (lock.outputs if lock else ()) if output.name == name]
        packs = [shard.digest.hex() for output in made for shard in output.shards]
        with self._writing() as (catalog, _):
            for pack in packs:
                catalog.drop_pack(pack)
                remove_tree(self._layout.packs / f"{pack}.safetensors")


# --- the place --------------------------------------------------------------------------------------------------------


def _models(cache: Path) -> Path:
    return cache.with_name(cache.name + _MODELS)


@contextlib.contextmanager
def _temporary(parent: Path) -> Iterator[Path]:
    """Have two directories, for a cache and for models, that are gone afterwards; remove what killed sweeps left."""
    for left in parent.glob(f"{_PREFIX}*"):
        cache = left.with_name(left.name.removesuffix(_MODELS))
        with _holding(cache) as held:
            if held:
                remove_tree(_models(cache))
                remove_tree(cache)
    try:
        cache = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        _models(cache).mkdir()
        crash_point("sweep.scratch")
    except OSError as error:
        fail_storage(error, parent, "make a temporary directory in")
    with _holding(cache):
        try:
            yield cache
        finally:
            remove_tree(_models(cache))
            remove_tree(cache)


@contextlib.contextmanager
def _holding(folder: Path) -> Iterator[bool]:
    """Hold a directory as long as this process lives; say whether nobody else does. One that is not there is free."""
    if not folder.is_dir():
        yield True
        return
    fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        free = False
    else:
        free = True
    try:
        yield free
    finally:
        os.close(fd)


# --- the command ------------------------------------------------------------------------------------------------------


def run_command(command: Command, model: Path, budget: str) -> dict[str, float]:
    """Run a command on a model and return the figures that it printed last.

    Raises
    ------
    EvaluationError
        If it cannot be run, ends with another exit code than 0, or prints none.
    """
    words = command.on(model)
    shown = shlex.join(command.words)
    try:
        done = subprocess.run(
            words,
            cwd=command.directory,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            check=False,
        )
    except OSError as error:
        raise EvaluationError(
            f"the model of budget {budget} cannot be evaluated: `{shown}` cannot be run: {error.strerror}",
            budget=budget,
            command=list(command.words),
        ) from None
    facts: dict[str, Any] = {"budget": budget, "command": list(command.words), "exit_code": done.returncode}
    if done.returncode:
        how = f"exit code {done.returncode}" if done.returncode > 0 else f"signal {-done.returncode}"
        message = f"the model of budget {budget} was not evaluated: `{shown}` ended with {how}"
        raise EvaluationError("\n".join([message, *_tail(done.stderr)]), **facts)
    figures = parse_figures(done.stdout)
    if figures is None:
        raise EvaluationError(
            "\n".join([f"`{shown}` printed no figures for the model of budget {budget}", *_tail(done.stdout)]),
            hint="let its last line be a JSON object of numbers, `name value` pairs, or one number",
            **facts,
        )
    return figures


def _tail(text: str) -> list[str]:
    return text.rstrip().splitlines()[-_TAIL:]


def parse_figures(text: str) -> dict[str, float] | None:
    """Return the figures that a command printed, or None if there are none that can be told.

    The last line counts: a JSON object of numbers (nested ones get names with dots), a number (its name is ``value``),
    or names followed by numbers, with or without ``=`` or ``:``. A JSON object may also be all that was printed.

    Examples
    --------
    >>> parse_figures("loading\nperplexity 8.25, loss=2.11")
    {'perplexity': 8.25, 'loss': 2.11}
    """
    lines = text.strip().splitlines()
    if not lines:
        return None
    return _json_figures(lines[-1]) or _named_figures(lines[-1]) or _json_figures(text)


def _json_figures(text: str) -> dict[str, float] | None:
    try:
        value = json.loads(text)
    except ValueError:
        return None
    if _is_number(value):
        return {"value": float(value)}
    return (dict(_flattened(value, "")) or None) if isinstance(value, dict) else None


def _flattened(value: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, float]]:
    for name, inner in value.items():
        if isinstance(inner, dict):
            yield from _flattened(inner, f"{prefix}{name}.")
        elif _is_number(inner):
            yield prefix + name, float(inner)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _named_figures(line: str) -> dict[str, float] | None:
    """Return figures of names and numbers; the second number behind a name is called ``name.2``."""
    figures: dict[str, float] = {}
    words: list[str] = []
    count = 0
    for part in _SEPARATORS.split(re.sub(r"[=:](?=\s|[-+.\d]|nan|inf)", " ", line).strip(" ,;")):
        if not _NUMBER.fullmatch(part):
            words, count = ([part] if count else [*words, part]), 0
            continue
        count += 1
        name = " ".join(words)
        if not name or len(words) > _WORDS:
            return None
        figures[name if count == 1 else f"{name}.{count}"] = float(part)
    return figures if count else None
