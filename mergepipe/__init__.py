"""mergepipe: a declarative, incremental, reproducible build system for weight-space model merging.

>>> import mergepipe
>>> project = mergepipe.open("Mergefile.toml")          # doctest: +SKIP
>>> project.build(["assistant"]).outputs["assistant"]   # doctest: +SKIP

Importing this package imports neither torch nor networkx, and reads no weights.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mergepipe._version import __version__

if TYPE_CHECKING:
    from mergepipe.operators.custom import merge_function
    from mergepipe.project import Project, open_project

__all__ = ["Project", "__version__", "merge_function", "open"]


def __dir__() -> list[str]:
    """List the public names, also those that are not imported yet."""
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    """Import the pipeline only when it is used, so that ``mergepipe --version`` stays quick."""
    if name in ("open", "Project"):
        from mergepipe import project

        return project.open_project if name == "open" else project.Project
    if name == "merge_function":
        from mergepipe.operators.custom import merge_function

        return merge_function
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


if TYPE_CHECKING:
    open = open_project  # noqa: A001 - `mergepipe.open` is the public name
