"""Signatures: made with a real key, verified with its other half, and never of anything but what lies beside them."""

import base64
import json
import os
import shutil
import subprocess
import sys

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from support.checkpoints import random_tensors
from support.cli import run_mergepipe
from support.projects import TINY, Messages, SmallProject, edit_tensor, skip_flushing

from mergepipe.errors import StorageError
from mergepipe.project import signing
from mergepipe.project.signing import Signer, SigningError
from mergepipe.project.verify import VerifyOptions, verify_directories

SHAPES = {"model.layers.0.a": (16, 16), "model.v": (64,)}


def write_key(folder, name, *, curve=None, password=None, private=None):
    private = private or ec.generate_private_key(curve or ec.SECP256R1())
    closed = serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption()
    pem, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    (folder / f"{name}.key").write_bytes(private.private_bytes(pem, form, closed))
    public = private.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo)
    (folder / f"{name}.pub").write_bytes(public)


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    folder = tmp_path_factory.mktemp("keys")
    for name in ("ours", "theirs"):
        write_key(folder, name)
    write_key(folder, "closed", password=b"open")
    write_key(folder, "koblitz", curve=ec.SECP256K1())
    write_key(folder, "rsa", private=rsa.generate_private_key(65537, 2048))
    return folder


@pytest.fixture
def project(tmp_path, monkeypatch):
    skip_flushing(monkeypatch)
    project = SmallProject(tmp_path / "project")
    for seed, name in enumerate(("base", "e1")):
        project.add_source(name, random_tensors(seed, SHAPES))
    experts = [{"source": "e1", "weight": 0.5}]
    project.set_output("m", {"operator": "task_arithmetic", "base": "base", "experts": experts})
    return project


def build(project, keys, key="ours", **options):
    return project.open(**options).build(signer=Signer(keys / f"{key}.key"))


def signature(project):
    return project.folder("m") / "model.sig"


def checked(project, keys, key="ours"):
    (found,) = project.open().verify(["m"], VerifyOptions(public_key=keys / f"{key}.pub")).outputs
    return found.signature, [problem.what for problem in found.problems if problem.kind == "signature"]


def test_what_was_signed_at_a_build_is_valid_by_the_other_half_of_the_key_alone(project, keys, tmp_path):
    assert build(project, keys).signed == {"m": True}
    assert checked(project, keys) == ("valid", [])
    assert checked(project, keys, "theirs")[0] == "invalid"
    assert "made with another key" in checked(project, keys, "theirs")[1][0]
    shutil.copytree(project.folder("m"), tmp_path / "elsewhere")
    report = verify_directories([tmp_path / "elsewhere"], VerifyOptions(public_key=keys / "ours.pub"), geometry=TINY)
    assert (report.ok, report.outputs[0].signature) == (True, "valid")


@pytest.mark.parametrize("name", ["model.safetensors", "mergepipe.json", "README.md", "model.sig"])
def test_a_tampered_byte_makes_it_invalid_and_the_file_is_named(project, keys, name):
    build(project, keys)
    path = project.folder("m") / name
    path.chmod(0o644)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))
    if name == "mergepipe.json":  # what says which files must be signed cannot be trusted then
        assert not project.open().verify(["m"], VerifyOptions(public_key=keys / "ours.pub")).ok
        return
    state, problems = checked(project, keys)
    assert state == "invalid"
    if name != "model.sig":
        assert f"`{name}` was changed after it was signed" in problems[0]


def test_a_manifest_of_other_files_does_not_get_past_the_signature(project, keys):
    """Whoever forges a manifest that is whole in itself still lacks the key."""
    from dataclasses import replace

    from mergepipe.lockfile.manifest import parse_manifest, render_manifest

    build(project, keys)
    path = project.folder("m") / "mergepipe.json"
    manifest = parse_manifest(path.read_bytes(), path)
    path.write_bytes(render_manifest(replace(manifest, decisions=("nothing to see",))))
    assert checked(project, keys)[0] == "invalid"
    files = tuple(name for name in manifest.files if name != "README.md")
    path.write_bytes(render_manifest(replace(manifest, files=files, generated=())))
    assert checked(project, keys)[0] == "invalid"


def test_a_build_that_changes_nothing_keeps_the_signature_and_reads_no_weight(project, keys):
    build(project, keys)
    before = signature(project).read_bytes(), signature(project).stat().st_mtime_ns
    assert project.build().signed is None
    messages = Messages()
    assert build(project, keys, reporter=messages).signed == {"m": False}
    assert (signature(project).read_bytes(), signature(project).stat().st_mtime_ns) == before
    assert messages.phases == []
    assert messages.warnings == []


def test_an_output_that_changes_without_a_key_has_no_signature_left_and_says_so(project, keys):
    build(project, keys)
    edit_tensor(project.source_file("e1"), "model.v", 3, 8.0)
    messages = Messages()
    project.build(reporter=messages)
    assert not signature(project).exists()
    assert any("`m` is not signed any more" in warning for warning in messages.warnings)
    assert checked(project, keys) == ("absent", ["the output is not signed"])
    assert build(project, keys).signed == {"m": True}
    assert checked(project, keys) == ("valid", [])


def test_an_output_that_changes_with_a_key_is_signed_anew(project, keys):
    build(project, keys)
    edit_tensor(project.source_file("e1"), "model.v", 3, 8.0)
    messages = Messages()
    assert build(project, keys, reporter=messages).signed == {"m": True}
    assert messages.warnings == []
    assert checked(project, keys) == ("valid", [])


def test_another_key_signs_again(project, keys):
    build(project, keys)
    assert build(project, keys, "theirs").signed == {"m": True}
    assert checked(project, keys, "theirs") == ("valid", [])
    signature(project).write_text("{}")
    assert build(project, keys, "theirs").signed == {"m": True}


def test_files_of_the_user_are_not_signed_and_may_change(project, keys):
    project.build()
    notes = project.folder("m") / "notes.txt"
    notes.write_text("mine")
    (project.folder("m") / "link").symlink_to("notes.txt")
    build(project, keys)
    notes.write_text("changed")
    (project.folder("m") / "more.txt").write_text("new")
    assert checked(project, keys) == ("valid", [])


def test_a_signature_is_no_file_of_the_user_and_no_obstacle(project, keys):
    """Also where it was there before: what it signed is gone."""
    project.build()
    signature(project).write_text("of something else")
    edit_tensor(project.source_file("e1"), "model.v", 3, 8.0)
    project.build()
    assert not signature(project).exists()
    assert project.open().verify(["m"]).outputs[0].others == 0


def test_an_output_that_is_not_published_is_not_signed(project, keys):
    project.set_output("hidden", {"operator": "linear", "experts": ["base", "e1"], "publish": False})
    assert build(project, keys).signed == {"m": True}


def test_what_was_touched_after_it_was_published_is_not_signed(project, keys, monkeypatch):
    signer = Signer(keys / "ours.key")
    hashing = signing._hashing

    def slow(names):
        edit_tensor(project.folder("m") / "model.safetensors", "model.v", 3, 9.0)
        return hashing(names)

    monkeypatch.setattr(signing, "_hashing", slow)
    with pytest.raises(signing.PublishError, match="touched"):
        project.open().build(signer=signer)
    assert not signature(project).exists()


def test_killed_while_it_is_signed_there_is_no_signature_and_the_next_build_signs(project, keys, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(signing, "replace_file", lambda *_, **__: (_ for _ in ()).throw(StorageError("killed")))
        with pytest.raises(StorageError):
            build(project, keys)
    assert not signature(project).exists()
    project.check("m")
    assert build(project, keys).signed == {"m": True}
    assert checked(project, keys) == ("valid", [])


def test_the_signature_says_what_the_standard_says(project, keys):
    """A Sigstore bundle with an in-toto statement in a DSSE envelope, over SHA-256 of each published file."""
    build(project, keys)
    bundle = json.loads(signature(project).read_text())
    envelope = bundle["dsseEnvelope"]
    assert envelope["payloadType"] == "application/vnd.in-toto+json"
    statement = json.loads(base64.b64decode(envelope["payload"]))
    assert statement["predicateType"].startswith("https://model_signing/signature/v1")
    names = {entry["name"] for entry in statement["predicate"]["resources"]}
    assert names == set(project.manifest("m").files)


@pytest.mark.slow
def test_the_tool_of_the_package_verifies_it_too(project, keys):
    build(project, keys)
    folder = project.folder("m")
    command = [sys.executable, "-m", "model_signing", "verify", "key", str(folder), "--signature"]
    options = [str(folder / "model.sig"), "--public_key", str(keys / "ours.pub")]
    assert "succeeded" in subprocess.run([*command, *options], capture_output=True, text=True, check=True).stdout
    (folder / "README.md").write_text("changed")
    assert subprocess.run([*command, *options], capture_output=True, check=False).returncode != 0


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nothing.key", "No such file"),
        ("ours.pub", "private key"),
        ("koblitz.key", "secp256k1"),
        ("closed.key", "assword"),
        ("rsa.key", "cannot be used as a private key: it is an RSA key"),
    ],
)
def test_a_key_that_cannot_sign_is_refused_with_the_reason(keys, name, words):
    with pytest.raises(SigningError) as caught:
        Signer(keys / name)
    assert words in caught.value.message
    assert "elliptic curve private key" in caught.value.hint
    assert caught.value.exit_status == 2


def test_an_encrypted_key_signs_with_its_password(project, keys):
    with pytest.raises(SigningError):
        Signer(keys / "closed.key", "wrong")
    project.open().build(signer=Signer(keys / "closed.key", "open"))
    assert checked(project, keys, "closed") == ("valid", [])


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"[" * 100_000, "cannot be read: it is nested"),
        (b'{"mediaType": ' * 50_000, "cannot be read: it is nested"),
        (b"x" * 300, "is not a signature of these files by this key: it is not a Sigstore bundle"),
        (b"\xff" * 300, "it is not a Sigstore bundle"),
        (b"{}", "it is not a Sigstore bundle"),
        (b"[]", "it is not a Sigstore bundle"),
        (b"[" * 3000, "more than any signature"),
    ],
)
def test_a_signature_that_is_made_to_mislead_is_one_problem_and_is_replaced(project, keys, data, words, monkeypatch):
    """A JSON text may be nested until its reader gives up, or be endless: it must not end what else is verified."""
    build(project, keys)
    signature(project).write_bytes(data)
    with monkeypatch.context() as patch:
        if len(data) == 3000:
            patch.setattr(signing, "_LARGEST", 2999)
        state, (problem,) = checked(project, keys)
    assert (state, words in problem) == ("invalid", True), problem
    assert len(problem) < 1000
    assert build(project, keys).signed == {"m": True}
    assert checked(project, keys) == ("valid", [])


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_a_signature_that_is_no_file_is_one_problem(project, keys, kind):
    build(project, keys)
    signature(project).unlink()
    os.mkfifo(signature(project)) if kind == "pipe" else signature(project).symlink_to("/dev/zero")
    assert checked(project, keys) == ("invalid", ["is not a signature of these files by this key: it is not a file"])


@pytest.mark.parametrize(
    ("name", "words"),
    [("nothing.pub", "as a public key"), ("ours.key", "as a public key"), ("rsa.pub", "it is an RSA key")],
)
def test_a_key_that_cannot_verify_is_refused(project, keys, name, words):
    build(project, keys)
    with pytest.raises(SigningError, match=words):
        project.open().verify(["m"], VerifyOptions(public_key=keys / name))


def test_without_the_package_both_say_what_to_install(keys, monkeypatch):
    monkeypatch.setattr(signing.importlib.util, "find_spec", lambda name: None)
    for use in (lambda: Signer(keys / "ours.key"), lambda: signing.check_public_key(keys / "ours.pub")):
        with pytest.raises(SigningError) as caught:
            use()
        assert caught.value.hint == "pip install 'mergepipe[sign]'"


def test_from_the_command_line(project, keys):
    built = run_mergepipe(
        ["build", "--sign", str(keys / "closed.key")], project.root, {"MERGEPIPE_SIGN_PASSWORD": "open"}
    )
    assert (built.code, "m: signed" in built.stdout) == (0, True)
    result = run_mergepipe(["verify", "--signature"], project.root, {"MERGEPIPE_PUBLIC_KEY": str(keys / "closed.pub")})
    assert (result.code, "signature valid" in result.stdout) == (0, True), result.text
    line = ["verify", "./build/m", "--signature", "--public-key", str(keys / "ours.pub"), "--json"]
    result = run_mergepipe(line, project.root)
    assert (result.code, result.stderr) == (1, "")
    assert json.loads(result.stdout)["outputs"][0]["signature"] == "invalid"
    result = run_mergepipe(["build", "--sign", "nothing.key"], project.root)
    assert (result.code, "No such file" in result.stderr) == (2, True)
