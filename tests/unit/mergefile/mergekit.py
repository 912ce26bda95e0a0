"""Short ways to import a mergekit configuration and to look at what it became."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from unit.mergefile.helpers import errors_of

from mergepipe.errors import MergefileError, MergepipeError
from mergepipe.mergefile.mergekit.imported import Imported, import_mergekit
from mergepipe.mergefile.mergekit.sources import Found
from mergepipe.operators.registry import signatures

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mergepipe.mergefile.mergekit.references import Place
    from mergepipe.mergefile.schema import Output

SIGNATURES = signatures()
SOURCE = Path("recipes/recipe.yml")
TARGET = Path("/project/Mergefile.toml")


def here(place: Place) -> Found | None:
    """Find every model, in a folder called as the model."""
    return Found(path=f"models/{place.path.strip('/')}")


def nowhere(place: Place) -> Found | None:
    """Find no model."""
    return None


def imported(text: str | bytes, locate=here, source: Path = SOURCE) -> Imported:
    """Import a configuration."""
    content = text if isinstance(text, bytes) else text.encode()
    return import_mergekit(content, source, TARGET, SIGNATURES, locate)


def outputs(text: str, **options) -> Mapping[str, Output]:
    """Return the outputs of a configuration."""
    return imported(text, **options).mergefile.outputs


def output(text: str, **options) -> Output:
    """Return the only output of a configuration."""
    (found,) = outputs(text, **options).values()
    return found


def problems(text: str | bytes, **options) -> list[MergefileError]:
    """Return what is wrong with a configuration."""
    with pytest.raises(MergepipeError) as caught:
        imported(text, **options)
    return errors_of(caught.value)


def only_problem(text: str | bytes, **options) -> MergefileError:
    """Return the one thing that is wrong with a configuration."""
    found = problems(text, **options)
    assert len(found) == 1, [error.message for error in found]
    return found[0]


def check(text: str, message: str, hint: str | None = None, **options) -> None:
    """Check the only problem of a configuration: it stands in the line that ``@@`` ends, and its message says this."""
    line = text[: text.index("@@")].count("\n") + 1
    error = only_problem(text.replace("@@", ""), **options)
    assert error.message.startswith(f"recipe.yml:{line}:"), error.message
    assert message in error.message.replace("\n  ", "; "), error.message
    assert error.facts["line"] == line
    if hint is not None:
        assert hint in (error.hint or ""), error.hint
