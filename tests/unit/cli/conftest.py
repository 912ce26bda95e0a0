import pytest
from unit.cli.fakes import FakeProject, Runner, clean_variables


@pytest.fixture
def cli(tmp_path, monkeypatch, capsys):
    """Return a runner of command lines in a folder with a Mergefile, on a fake project."""
    import mergepipe.project
    import mergepipe.project.caches

    clean_variables(monkeypatch)
    (tmp_path / "Mergefile.toml").write_text("version = 1\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    project = FakeProject(root=tmp_path)
    monkeypatch.setattr(mergepipe.project, "open_project", project.open)
    monkeypatch.setattr(mergepipe.project.caches, "open_cache", project.open)
    return Runner(project=project, capture=capsys)
