"""What the manual of a command says beside its text, options and examples, by the words of the command."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field

from mergepipe.values import dataclass

Rows = Sequence[tuple[str, str]]
LOOKS = ("NO_COLOR", "FORCE_COLOR")
USUAL = ("MERGEPIPE_CACHE_DIR", "MERGEPIPE_ALLOW_CUSTOM", "MERGEPIPE_FOLLOW_LINKS")


@dataclass(frozen=True, slots=True, kw_only=True)
class Manual:
    """The further sections of a manual.

    Attributes
    ----------
    exit_codes
        What a code means for this command, where that is more than `COMMON_CODES` says.
    files
        What it reads and writes.
    environment
        Names of variables that matter, of those in `VARIABLES`.
    see_also
        Command lines, and pages of the documentation.
    """

    exit_codes: Mapping[int, str] = field(default_factory=dict)
    files: Rows = ()
    environment: Sequence[str] = (*USUAL, *LOOKS)
    see_also: Sequence[str] = ()

    def codes(self) -> Rows:
        """Return every exit code with what it means."""
        found = {**COMMON_CODES, **self.exit_codes}
        return [(str(code), found[code]) for code in sorted(found)]


COMMON_CODES: Mapping[int, str] = {
    0: "done",
    1: "it failed, for example because a file cannot be read",
    2: "the input is wrong: the command line, the Mergefile or a checkpoint",
    130: "interrupted",
}
VARIABLES: Mapping[str, str] = {
    "MERGEPIPE_CACHE_DIR": "where the cache is, unless `--cache-dir` says so",
    "MERGEPIPE_ALLOW_CUSTOM": "`1` runs the code of custom operators",
    "MERGEPIPE_FOLLOW_LINKS": "`1` follows links that lead out of a checkpoint's folder",
    "NO_COLOR": "if set, no colour",
    "FORCE_COLOR": "if set, colour also where no terminal is",
    "MERGEPIPE_PUBLIC_KEY": "the file with the key to verify signatures with, unless `--public-key` names one",
    "MERGEPIPE_SIGN_PASSWORD": "the password of the key to sign with",
}
_MERGEFILE = ("Mergefile.toml", "what is merged, how, and into what; in this folder or the nearest above")
_LOCK = ("Mergefile.lock", "what the outputs were made of, beside the Mergefile")
_CACHE = (".mergecache/", "digests and finished shards, beside the Mergefile")
_READ = (_MERGEFILE, _LOCK, _CACHE)
_DIRECTORY = ("build/OUTPUT/", "an output: weights, config, tokenizer, README.md, mergepipe.json")
_MANIFEST = ("mergepipe.json", "the full record of an output, in its directory")

MANUALS: Mapping[str, Manual] = {
    "": Manual(
        exit_codes={
            1: "it failed, for example because the disk is full; `diff`, `verify`, `replay`: something differs",
            3: "`build --locked`, `git check`: the lock would change",
        },
        files=(*_READ, _DIRECTORY),
        see_also=("mergepipe help COMMAND", "docs/getting-started.md", "docs/reference/cli.md"),
    ),
    "init": Manual(
        files=((_MERGEFILE[0], "is written"),),
        environment=LOOKS,
        see_also=("mergepipe import", "mergepipe plan", "docs/reference/mergefile.md"),
    ),
    "import": Manual(
        files=(("FILE", "a configuration of mergekit, in YAML; is read"), (_MERGEFILE[0], "is written")),
        environment=LOOKS,
        see_also=("mergepipe init", "docs/guides/from-mergekit.md"),
    ),
    "build": Manual(
        exit_codes={
            1: "the build failed: a full disk, a source that changed meanwhile, numbers that are not finite",
            3: "with `--locked`: the lock would change",
            130: "interrupted; the next build goes on from there",
        },
        files=(_MERGEFILE, ("Mergefile.lock", "what the outputs were made of: commit it"), _CACHE, _DIRECTORY),
        environment=(*USUAL, "MERGEPIPE_SIGN_PASSWORD", *LOOKS),
        see_also=("mergepipe plan", "mergepipe status", "mergepipe diff", "docs/guides/incremental-work.md"),
    ),
    "plan": Manual(files=(_MERGEFILE, _CACHE), see_also=("mergepipe build", "mergepipe explain", "mergepipe sweep")),
    "sweep": Manual(
        exit_codes={1: "it failed, or the command of `--eval` did", 130: "interrupted; what was measured is kept"},
        files=(_MERGEFILE, _CACHE, ("FILE", "of `--csv`, `--plot` and `--html`; is written")),
        see_also=("mergepipe plan", "docs/guides/choose-a-budget.md", "docs/concepts/budgets.md"),
    ),
    "status": Manual(files=_READ, see_also=("mergepipe build", "mergepipe explain")),
    "explain": Manual(
        files=(*_READ, _MANIFEST), see_also=("mergepipe status", "mergepipe diff", "docs/concepts/cache-and-keys.md")
    ),
    "diff": Manual(
        exit_codes={0: "no difference", 1: "there are differences", 2: "they could not be compared"},
        files=(("Mergefile.lock", "the lock on disk, and those of git revisions"), _MANIFEST),
        see_also=("mergepipe git", "mergepipe explain", "docs/formats/lockfile.md"),
    ),
    "report": Manual(
        files=(*_READ, _MANIFEST, ("OUTPUT.report.html", "the page of an output; is written")),
        see_also=("mergepipe explain", "mergepipe sweep"),
    ),
    "verify": Manual(
        exit_codes={0: "everything is what it should be", 1: "something differs, or cannot be read"},
        files=(_DIRECTORY, *_READ),
        environment=(*USUAL, "MERGEPIPE_PUBLIC_KEY", *LOOKS),
        see_also=("mergepipe replay", "docs/formats/manifest.md"),
    ),
    "replay": Manual(
        exit_codes={
            0: "what was made again equals what the manifest says",
            1: "it differs, or it failed",
            2: "the manifest or a source is not what it should be, or the command line is wrong",
        },
        files=(_MANIFEST, ("replayed/OUTPUT/", "what was made again, unless `--out` names another place")),
        see_also=("mergepipe verify", "docs/formats/manifest.md"),
    ),
    "pack": Manual(
        exit_codes={1: "it failed: a full disk, a checkpoint that changed meanwhile"},
        files=(
            (_MERGEFILE[0], "names of sources, if there is one"),
            ("DIR/progressive.json", "the record of the progressive checkpoint; is written"),
            ("DIR/tensors/", "its codes, and tensors that have none; is written"),
        ),
        environment=("MERGEPIPE_FOLLOW_LINKS", *LOOKS),
        see_also=("mergepipe build", "docs/guides/publish-an-expert.md", "docs/formats/progressive-checkpoint.md"),
    ),
    "git": Manual(environment=LOOKS, see_also=("mergepipe diff", "docs/formats/lockfile.md")),
    "git setup": Manual(
        exit_codes={1: "with `--check`: something is missing; else it failed"},
        files=((".git/config", "the drivers of this clone"), (".gitattributes", "which files they are for: commit it")),
        environment=LOOKS,
        see_also=("mergepipe diff", "mergepipe git check"),
    ),
    "git check": Manual(
        exit_codes={
            0: "every lock goes with its Mergefile",
            3: "a lock is missing, says something else than its Mergefile, or contradicts itself",
        },
        files=(_MERGEFILE, _LOCK),
        environment=LOOKS,
        see_also=("mergepipe status", "mergepipe build --locked"),
    ),
    "git diff-driver": Manual(files=(_LOCK,), environment=LOOKS, see_also=("mergepipe diff", "mergepipe git setup")),
    "git merge-driver": Manual(
        exit_codes={0: "merged", 1: "there is a conflict, or it failed"},
        files=(_LOCK,),
        environment=LOOKS,
        see_also=("mergepipe build", "mergepipe git setup"),
    ),
    "cache": Manual(files=(_CACHE,), see_also=("docs/concepts/cache-and-keys.md",)),
    "cache info": Manual(files=(_CACHE,), see_also=("mergepipe cache prune", "mergepipe cache verify")),
    "cache prune": Manual(
        exit_codes={2: "the command line is wrong, or a lock that may name packs cannot be read: nothing was removed"},
        files=(_CACHE, (_LOCK[0], "with `--unreferenced`, the packs that are needed; of other projects, too")),
        see_also=("mergepipe cache info", "docs/concepts/cache-and-keys.md"),
    ),
    "cache verify": Manual(
        exit_codes={
            0: "nothing is damaged",
            1: "something was damaged, and taken out of use; or it failed",
        },
        files=(_CACHE, (".mergecache/quarantine/", "damaged packs go there; `mergepipe cache prune` removes them")),
        see_also=("mergepipe verify", "mergepipe cache prune"),
    ),
    "completion": Manual(environment=(), see_also=("mergepipe help", "docs/reference/cli.md")),
    "help": Manual(environment=LOOKS, see_also=("docs/reference/cli.md",)),
}


def manual_of(words: str) -> Manual:
    """Return the further sections for the words of a command (``cache prune``), else what is common to all."""
    return MANUALS.get(words, Manual())
