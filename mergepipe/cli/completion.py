"""``mergepipe completion``: the script by which a shell completes command lines."""

from __future__ import annotations

import click

from mergepipe.cli.command import Command
from mergepipe.cli.session import Session

VARIABLE = "_MERGEPIPE_COMPLETE"
"""By this environment variable a shell asks what to offer."""
SHELLS = ("bash", "zsh", "fish")
_EXAMPLES = (
    ("mergepipe completion bash >~/.mergepipe.bash", "then add `. ~/.mergepipe.bash` to ~/.bashrc"),
    ("mergepipe completion zsh >~/.zfunc/_mergepipe", "a folder of zsh's $fpath"),
    ("mergepipe completion fish >~/.config/fish/completions/mergepipe.fish", "fish reads it at its next start"),
)


@click.command(cls=Command, examples=_EXAMPLES)
@click.argument("shell", metavar="SHELL", type=click.Choice(SHELLS))
@click.pass_obj
def completion(session: Session, shell: str) -> None:
    """Print the script by which a shell completes mergepipe's command lines.

    SHELL is bash (4.4 or newer), zsh or fish. Completed are commands, options and their values, the outputs of the
    Mergefile, files and folders. The script asks mergepipe each time: it is installed once, and needs no update.
    """
    script = completion_script(shell)
    if session.options.json_output:
        session.console.json({"shell": shell, "script": script})
    else:
        session.console.help(script.rstrip("\n"))


def completion_script(shell: str) -> str:
    """Return the script for a shell of `SHELLS`."""
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    assert kind is not None, "click knows these shells"
    made = kind(click.Command("mergepipe"), {}, "mergepipe", VARIABLE)
    # Not `source()`, which starts a bash to learn its version: the script may be for another machine.
    return made.source_template % made.source_vars()
