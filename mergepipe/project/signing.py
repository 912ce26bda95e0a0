"""Signing output directories, and verifying their signatures: OpenSSF model signing with a key pair.

A signature covers every file that mergepipe put into the directory, the manifest among them; files of the user are not
signed. It lies beside them as ``model.sig``, a Sigstore bundle that the tool ``model_signing`` verifies as well.

It is written when the directory is published, in one step: killed before, the directory has no signature, and the next
build signs it. A signature never outlives what it signs: publication leaves it behind (`mergepipe.publish.directory`).
"""

from __future__ import annotations

import base64
import contextlib
import importlib.util
import io
import json
import os
import re
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mergepipe.cache.catalog import Catalog
from mergepipe.errors import LockError, PublishError, StorageError
from mergepipe.fsio.durable import drop_temporary, replace_file
from mergepipe.fsio.reading import read_regular
from mergepipe.lockfile.manifest import MANIFEST_NAME, parse_manifest
from mergepipe.mergefile.schema import Mergefile, Output
from mergepipe.project.facts import known_output
from mergepipe.project.stages import record_place
from mergepipe.publish.directory import SIGNATURE, touched_files
from mergepipe.reporting import Reporter

if TYPE_CHECKING:
    from model_signing import hashing, verifying

PASSWORD_VARIABLE = "MERGEPIPE_SIGN_PASSWORD"  # noqa: S105 - the name of a variable
_CHANGED = re.compile(r"Hash mismatch for '(.+?)':")
_MALFORMED = (json.JSONDecodeError, UnicodeDecodeError, KeyError, IndexError, TypeError, AttributeError)
_LARGEST = 64 << 20  # bytes; a signature has some 200 for each file
_INSTALL = "pip install 'mergepipe[sign]'"


class SigningError(PublishError):
    """A key cannot be used, or what signs with it is not installed."""


class Signer:
    """Signs output directories with a private key.

    Parameters
    ----------
    key
        The path of an elliptic curve private key in PEM (P-256, P-384 or P-521).
    password
        What opens it, if it is encrypted.

    Raises
    ------
    SigningError
        If it cannot be used.
    """

    def __init__(self, key: Path, password: str | None = None) -> None:
        _require()
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives import serialization
        from model_signing import signing

        secret: Any = None if password is None else password.encode()  # the package asks for text, and takes bytes
        try:
            public = serialization.load_pem_private_key(key.read_bytes(), secret).public_key()
            _check_elliptic(public)
            self._public = public.public_bytes(
                serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
            )
            self._config = signing.Config().use_elliptic_key_signer(  # type: ignore[no-untyped-call]
                private_key=key, password=secret
            )
        except (OSError, ValueError, TypeError, AttributeError, UnsupportedAlgorithm) as error:
            raise _key_error(key, "private", error) from error

    def sign(self, directory: Path, is_intact: Callable[[], bool]) -> bool:
        """Sign a directory that was published, unless it has a signature of this key for what it holds.

        Parameters
        ----------
        is_intact
            Tells whether the files are those that were published.

        Returns
        -------
        bool
            Whether it was signed now.

        Raises
        ------
        PublishError
            If the directory is not what was published.
        StorageError
            If it cannot be read, or the signature cannot be written.
        """
        names = signed_names(directory)
        if is_intact() and self._is_signed(directory, names):
            return False
        others = [name for name in _files(directory) if name not in names]
        hashed = _hashing(names).set_ignored_paths(paths=[*others, SIGNATURE], ignore_git_paths=False)
        with tempfile.TemporaryDirectory(prefix="mergepipe-") as folder:
            written = Path(folder) / SIGNATURE
            try:
                self._config.set_hashing_config(hashed).sign(directory, written)
                data = written.read_bytes()
            except (OSError, ValueError) as error:
                raise StorageError(f"cannot sign `{directory}`: {error}", path=str(directory)) from error
        if not is_intact():
            raise PublishError(
                f"`{directory}` is not what was published, so it is not signed: files in it were touched",
                hint="run `mergepipe build` again",
                path=str(directory),
            )
        replace_file(directory / SIGNATURE, data, point="signature")
        return True

    def _is_signed(self, directory: Path, names: Sequence[str]) -> bool:
        """Return whether the signature that is there is of this key, for the manifest that is there.

        That has the digests of all that lies beside it, so no weight is read.
        """
        try:
            statement = json.loads(_payload(directory / SIGNATURE))
            digests = {entry["name"]: entry["digest"] for entry in statement["predicate"]["resources"]}
            manifest = sha256(read_regular(directory / MANIFEST_NAME)).hexdigest()
        except (OSError, ValueError, KeyError, TypeError, RecursionError, MemoryError):
            return False
        if set(digests) != set(names) or digests[MANIFEST_NAME] != manifest:
            return False
        with tempfile.TemporaryDirectory(prefix="mergepipe-") as folder:
            key = Path(folder) / "key.pub"
            key.write_bytes(self._public)
            try:
                _verify(directory, _verifier(key).set_hashing_config(_unhashed()))
            except _SignatureHoldsError:
                return True
            except _refusals():
                return False
        return False


def check_public_key(path: Path) -> None:
    """Check that a public key can be used.

    Raises
    ------
    SigningError
        If it cannot, or what verifies with it is not installed.
    """
    _require()
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives import serialization

    try:
        _check_elliptic(serialization.load_pem_public_key(path.read_bytes()))
        _verifier(path)
    except (OSError, ValueError, TypeError, AttributeError, UnsupportedAlgorithm) as error:
        raise _key_error(path, "public", error) from error


def signature_problem(directory: Path, names: Sequence[str], public_key: Path) -> str | None:
    """Return what is wrong with the signature of a directory, None if it is one of these files by that key.

    Parameters
    ----------
    names
        The files that must be signed: those that mergepipe put there.
    """
    check_public_key(public_key)
    hashed = _hashing(names).set_allow_symlinks(True)  # a copy may consist of links, as in the hub's cache
    try:
        _verify(directory, _verifier(public_key).set_hashing_config(hashed))
    except (RecursionError, MemoryError):
        return "cannot be read: it is nested more deeply than any signature is"
    except _MALFORMED:
        return "is not a signature of these files by this key: it is not a Sigstore bundle"
    except _refusals() as error:
        return f"is not a signature of these files by this key{_reason(str(error))}"
    return None


def _reason(message: str) -> str:
    """Return in our words why the package refuses a signature; what files it names, else what it says."""
    named = dict.fromkeys(_CHANGED.findall(message.replace("\\'", "'")))
    if named:
        return ": " + ", ".join(f"`{name}`" for name in named) + " was changed after it was signed"
    if "Key mismatch" in message:
        return ": it was made with another key"
    text = " ".join(message.split())
    return f": {text}" if text else ""


def signed_names(directory: Path) -> tuple[str, ...]:
    """Return the files of a directory that a signature covers: those that mergepipe put there.

    Raises
    ------
    PublishError
        If its manifest cannot be read.
    """
    path = directory / MANIFEST_NAME
    try:
        return parse_manifest(read_regular(path), path).files
    except (OSError, LockError) as error:
        reason = error.message if isinstance(error, LockError) else error.strerror
        raise PublishError(
            f"`{directory}` cannot be signed: {reason}", hint="run `mergepipe build` again", path=str(directory)
        ) from error


# --- the package ------------------------------------------------------------------------------------------------------


class _SignatureHoldsError(Exception):
    """Raised in the place of hashing: only then the package begins to hash when the signature itself is valid."""


def _require() -> None:
    """Check that the package is installed.

    Raises
    ------
    SigningError
        If it is not.
    """
    missing = [name for name in ("model_signing", "OpenSSL") if importlib.util.find_spec(name) is None]
    if missing:
        raise SigningError("signatures need the package `model-signing`, which is not installed", hint=_INSTALL)


def _key_error(path: Path, kind: str, error: Exception) -> SigningError:
    reason = error.strerror if isinstance(error, OSError) else str(error).partition("\n")[0]
    return SigningError(
        f"`{path}` cannot be used as a {kind} key: {reason or type(error).__name__}",
        hint=f"it must be an elliptic curve {kind} key (P-256, P-384 or P-521) in PEM"
        + (f"; {PASSWORD_VARIABLE} holds the password of an encrypted one" if kind == "private" else ""),
        path=str(path),
    )


def _verifier(public_key: Path) -> verifying.Config:
    from model_signing import verifying

    config = verifying.Config()  # type: ignore[no-untyped-call]
    return config.use_elliptic_key_verifier(public_key=public_key)


def _check_elliptic(public: object) -> None:
    """Raise a `ValueError` for a key of another kind, by its public half."""
    from cryptography.hazmat.primitives.asymmetric import dsa, ec, ed448, ed25519, rsa

    kinds = {
        rsa.RSAPublicKey: "an RSA key",
        dsa.DSAPublicKey: "a DSA key",
        ed25519.Ed25519PublicKey: "an Ed25519 key",
        ed448.Ed448PublicKey: "an Ed448 key",
    }
    if not isinstance(public, ec.EllipticCurvePublicKey):
        found = next((name for kind, name in kinds.items() if isinstance(public, kind)), "one of another kind")
        raise ValueError(f"it is {found}")  # noqa: TRY004 - like everything else that is wrong with a key


def _check_readable(signature: Path) -> None:
    """Check that a signature is a file, and no larger than any is: it is read as a whole.

    Raises
    ------
    OSError
        If it is not there.
    ValueError
        If it is not such a file; devices and pipes are not opened.
    """
    status = signature.stat()
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("it is not a file")
    if status.st_size > _LARGEST:
        raise ValueError(f"it has {status.st_size:,} bytes, more than any signature")


def _verify(directory: Path, config: verifying.Config) -> None:
    _check_readable(directory / SIGNATURE)
    with contextlib.redirect_stdout(io.StringIO()):  # the package prints warnings where results go
        config.verify(directory, directory / SIGNATURE)


def _refusals() -> tuple[type[Exception], ...]:
    """Return what the package raises for a signature that does not hold, or that is none."""
    from cryptography.exceptions import InvalidSignature

    return (InvalidSignature, *_MALFORMED, ValueError, OSError, RecursionError, MemoryError)


def _hashing(names: Sequence[str]) -> hashing.Config:
    """Return what hashes these files of a directory, and no others."""
    from model_signing import hashing

    class _Files(hashing.Config):
        def hash(self, model_path: Any, *, files_to_hash: Any = None) -> Any:
            return super().hash(model_path, files_to_hash=[Path(model_path) / name for name in names])

    return _Files()  # type: ignore[no-untyped-call]


def _unhashed() -> hashing.Config:
    from model_signing import hashing

    class _Nothing(hashing.Config):
        def hash(self, model_path: Any, *, files_to_hash: Any = None) -> Any:
            raise _SignatureHoldsError

    return _Nothing()  # type: ignore[no-untyped-call]


def _payload(path: Path) -> bytes:
    """Return the signed statement of a bundle, as it stands: whether it was signed is another question."""
    _check_readable(path)
    return base64.b64decode(json.loads(path.read_bytes())["dsseEnvelope"]["payload"])


def _files(directory: Path) -> Iterator[str]:
    for folder, _, names in os.walk(directory):
        for name in names:
            yield Path(folder, name).relative_to(directory).as_posix()


# --- builds -----------------------------------------------------------------------------------------------------------


class Signatures:
    """The signatures of the outputs of a project while it is built.

    Parameters
    ----------
    signer
        What signs the outputs when they are published; None signs none.
    """

    def __init__(self, mergefile: Mergefile, signer: Signer | None) -> None:
        self._mergefile = mergefile
        self._signer = signer
        self._before = self._signed()
        for output in mergefile.outputs.values():
            if output.publish:
                drop_temporary(self._place(output) / SIGNATURE)

    def _signed(self) -> set[str]:
        """Return the outputs whose directories have a signature, whatever it is worth."""
        outputs = [output for output in self._mergefile.outputs.values() if output.publish]
        return {output.name for output in outputs if os.path.lexists(self._place(output) / SIGNATURE)}

    def _place(self, output: Output) -> Path:
        return record_place(self._mergefile, output)

    def renew(self, names: Iterable[str], catalog: Catalog, reporter: Reporter) -> dict[str, bool] | None:
        """Sign outputs that were just built, and say which lost a signature of what they were before.

        Returns
        -------
        dict or None
            By output whether it was signed now; False if it was signed before, as it is. Outputs that are not published
            are left out. None where nothing was to be signed.

        Raises
        ------
        PublishError
            If a directory is not what was published.
        StorageError
            If the file system refuses; the directory has no signature then, or the one that it had.
        """
        signed = None if self._signer is None else self._sign(names, self._signer, catalog)
        for name in sorted(self._before - self._signed()):
            reporter.warn(
                f"output `{name}` is not signed any more: its signature was of what it was before; `--sign` signs it"
            )
        return signed

    def _sign(self, names: Iterable[str], signer: Signer, catalog: Catalog) -> dict[str, bool]:
        found = {}
        for output in (self._mergefile.outputs[name] for name in names):
            if not output.publish:
                continue
            target = self._place(output)

            def is_intact(target: Path = target) -> bool:
                known = known_output(catalog, target)
                return known is not None and not touched_files(target, known.files)

            found[output.name] = signer.sign(target, is_intact)
        return found
