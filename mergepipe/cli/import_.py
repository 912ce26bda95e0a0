"""``mergepipe import``: a Mergefile for a configuration of mergekit."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mergepipe.cli.command import Command
from mergepipe.cli.errors import UsageError, suggestion
from mergepipe.cli.init import next_steps
from mergepipe.cli.session import MERGEFILE, Session
from mergepipe.cli.tables import plain, rows
from mergepipe.errors import MergefileError, fail_storage

if TYPE_CHECKING:
    from mergepipe.mergefile.mergekit.imported import Imported
    from mergepipe.mergefile.mergekit.references import Place
    from mergepipe.mergefile.mergekit.sources import Found
    from mergepipe.mergefile.schema import Source

_EXAMPLES = (
    ("mergepipe import ties.yml", "write Mergefile.toml"),
    ("mergepipe import ties.yml -o -", "print it"),
    ("mergepipe import ties.yml --model org/name=models/name", "that one is here"),
)
_STDOUT = "-"


@click.command("import", cls=Command, examples=_EXAMPLES)
@click.argument("configuration", metavar="FILE")
@click.option("-o", "--output", metavar="MERGEFILE", help="Write it here; - prints it.  [default: Mergefile.toml]")
@click.option(
    "--model",
    "models",
    metavar="NAME=PATH",
    multiple=True,
    help="Where a model is that FILE calls NAME. May be given several times.",
)
@click.option("--force", is_flag=True, help="Replace a Mergefile that is there.")
@click.pass_obj
def import_(session: Session, configuration: str, output: str | None, models: tuple[str, ...], force: bool) -> None:
    """Write a commented Mergefile for a mergekit configuration.

    FILE is a YAML file for mergekit-yaml or mergekit-multi. Models that are folders here become paths, others hub
    repositories. Whatever a Mergefile cannot say is an error with the reason: nothing is dropped in silence.
    """
    from mergepipe.fsio.durable import replace_file
    from mergepipe.mergefile.mergekit.imported import import_mergekit
    from mergepipe.operators.registry import signatures

    target = Path(output or session.options.file or MERGEFILE)
    printed = output == _STDOUT
    if not printed:
        _check_target(target, force=force)
    source = Path(configuration)
    locator = _Locator(_places(models), source.parent, Path() if printed else target.parent)
    content = _content(source)
    imported = import_mergekit(content, source, Path(MERGEFILE) if printed else target, signatures(), locator)
    locator.check_used()
    if not printed:
        replace_file(target, imported.text.encode())
    _report(session, imported, None if printed else target)


def _check_target(target: Path, *, force: bool) -> None:
    if target.is_dir():
        raise MergefileError(f"`{target}` is a directory", hint="give the path of the file", path=str(target))
    if os.path.lexists(target) and not force:
        raise MergefileError(
            f"`{target}` exists already", hint="`--force` replaces it, `-o FILE` writes another", path=str(target)
        )


def _content(path: Path) -> bytes:
    """Return what is in the configuration, up to a byte more than it may have."""
    from mergepipe.mergefile.mergekit.yamltext import LARGEST_FILE

    try:
        with path.open("rb") as file:
            return file.read(LARGEST_FILE + 1)
    except (FileNotFoundError, NotADirectoryError):
        raise MergefileError(f"there is no file `{path}`", file=str(path)) from None
    except IsADirectoryError:
        hint = "give the path of the YAML file"
        raise MergefileError(f"`{path}` is a directory", hint=hint, file=str(path)) from None
    except OSError as error:
        fail_storage(error, path, "read")


def _places(models: tuple[str, ...]) -> dict[str, str]:
    """Return the paths of `--model` by the name of the model.

    Raises
    ------
    UsageError
        If one has no `=`, or its path leads nowhere.
    """
    places = {}
    for text in models:
        name, _, path = text.partition("=")
        if not name or not path:
            raise UsageError(f"`--model {text}` is not NAME=PATH", hint="for example `--model org/name=models/name`")
        if not Path(path).exists():
            raise UsageError(f"`--model {text}`: there is no `{path}`", path=path)
        places[name] = path
    return places


class _Locator:
    """Says where a model is: where `--model` says, else in the current folder, as mergekit has it, else beside FILE."""

    def __init__(self, places: Mapping[str, str], beside: Path, root: Path) -> None:
        self._places = places
        self._beside = beside
        self._root = root
        self._asked: set[str] = set()

    def __call__(self, place: Place) -> Found | None:
        from mergepipe.mergefile.mergekit.sources import Found

        self._asked |= {str(place), place.path}
        named = self._places.get(str(place), self._places.get(place.path))
        if named is not None:
            return Found(path=self._written(Path(named)))
        for folder in (Path(), self._beside):
            path = folder / place.path
            if path.exists():
                return Found(path=self._written(path))
        # A path that can be nothing else, which is somewhere else or not made yet.
        if place.path.startswith(("/", "./", "../", "~/")):
            home = place.path.startswith("~")
            return Found(path=place.path if home else self._written(Path(place.path)), exists=False)
        return None

    def check_used(self) -> None:
        """Check that every `--model` was of use.

        Raises
        ------
        UsageError
            If one names a model that the configuration does not have.
        """
        for name in self._places:
            if name not in self._asked:
                hint = suggestion(name, sorted(self._asked)) or f"its models are: {', '.join(sorted(self._asked))}"
                raise UsageError(f"`--model {name}=...`: the configuration has no model of this name", hint=hint)

    def _written(self, path: Path) -> str:
        """Return a path as the Mergefile has it: relative, unless it was given as an absolute one elsewhere."""
        root = self._root.absolute()
        if path.is_absolute() and not path.is_relative_to(root):
            return path.as_posix()
        text = Path(os.path.relpath(path, root)).as_posix()
        return f"./{text}" if text.startswith("~") else text


def _report(session: Session, imported: Imported, target: Path | None) -> None:
    mergefile, console = imported.mergefile, session.console
    notes = [*imported.notes, *imported.unsupported]
    if session.options.json_output:
        console.json(
            {
                "path": None if target is None else str(target),
                "outputs": list(mergefile.outputs),
                "sources": {source.name: _where(source) for source in mergefile.sources.values()},
                "notes": notes,
                **({"text": imported.text} if target is None else {}),
            }
        )
        return
    if target is None:
        console.help(imported.text.removesuffix("\n"))
    else:
        console.result(_lines(imported, target))
    for note in imported.notes:
        console.note(note)
    for what in imported.unsupported:
        console.warn(what)


def _next(imported: Imported, target: Path) -> list[str]:
    """Say how to go on: where the file is, and where models are that only a hub has."""
    hub = next((source for source in imported.mergefile.sources.values() if source.hub is not None), None)
    if hub is not None:
        name = _where(hub)
        return ["", f"say where a model is that lies here: `--model {plain(name)}=PATH` (and `--force`)"]
    return next_steps(target)


def _where(source: Source) -> str:
    where = source.place or source.hub or ""
    return where if source.revision is None else f"{where}@{source.revision}"


def _lines(imported: Imported, target: Path) -> list[str]:
    mergefile = imported.mergefile
    table = [("source", plain(source.name), plain(_where(source))) for source in mergefile.sources.values()]
    for output in mergefile.outputs.values():
        where = plain(output.path) if output.publish else "for other outputs only"
        table.append(("output", plain(output.name), f"{output.operator}, {where}"))
    return [f"wrote {plain(str(target))}", *rows(table, indent="  "), *_next(imported, target)]
