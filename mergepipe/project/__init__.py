"""The pipeline: Mergefile -> sources -> catalog -> plan -> graph -> engine -> publish -> lock."""

from mergepipe.project.session import Project, open_project

__all__ = ["Project", "open_project"]
