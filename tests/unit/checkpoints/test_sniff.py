"""What lies under a checkpoint's name when it is not safetensors: said in words, never mistaken for safetensors."""

from __future__ import annotations

import gzip
import io
import pickle
import tarfile
import zipfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.checkpoints import random_tensors, safetensors_bytes

from mergepipe.checkpoints.sniff import SNIFF_BYTES, sniff

# A loaded machine may take any time for one example.
QUIET = settings(deadline=None)

LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"4" * 64 + b"\nsize 4976698672\n"


def archive() -> bytes:
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w") as file:
        file.writestr("archive/data.pkl", b"x")
    return target.getvalue()


def tar() -> bytes:
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w") as file:
        file.addfile(tarfile.TarInfo("weights"))
    return target.getvalue()


@pytest.mark.parametrize(
    ("kind", "words", "content"),
    [
        ("git-lfs-pointer", "Git LFS pointer", LFS),
        ("html", "HTML page", b"<!DOCTYPE html>\n<html><head><title>Sign in</title>"),
        ("html", "HTML page", b"\xef\xbb\xbf\n  <!-- proxy -->\n<HTML lang=en>"),
        ("xml", "XML document", b'<?xml version="1.0"?><Error><Code>AccessDenied</Code></Error>'),
        ("json", "JSON document", b'{"error":"Unauthorized","message":"token required"}'),
        ("json", "JSON document", b"[1, 2]"),
        ("zip", "PyTorch", archive()),
        ("pickle", "pickle", pickle.dumps({"w": 1}, protocol=2)),
        ("pickle", "pickle", pickle.dumps({"w": 1}, protocol=4)),
        ("gguf", "GGUF", b"GGUF\x03\0\0\0" + b"\0" * 16),
        ("gzip", "gzip", gzip.compress(b"x", mtime=0)),
        ("tar", "tar", tar()),
        ("hdf5", "HDF5", b"\x89HDF\r\n\x1a\n" + b"\0" * 8),
        ("zeros", "all zeros", bytes(SNIFF_BYTES)),
        ("text", "`Entry not found`", b"Entry not found\nsecond line"),
        ("text", "`Zugriff verweigert: für`", "Zugriff verweigert: für".encode()),
    ],
)
def test_a_file_is_recognised(kind, words, content):
    found = sniff(content[:SNIFF_BYTES])
    assert found is not None
    assert found.kind == kind
    assert words in found.what
    assert found.hint


def test_a_pointer_says_how_large_the_real_file_is_and_how_to_fetch_it():
    found = sniff(LFS)
    assert found is not None
    assert "4.98 GB" in found.what
    assert "git lfs pull" in found.hint


def test_a_text_cut_inside_a_character_is_still_text():
    found = sniff("über alles ".encode() * 400)
    assert found is not None
    cut = sniff(("a" + "é" * 4000).encode()[:SNIFF_BYTES])
    assert cut is not None
    assert cut.kind == "text"


@pytest.mark.parametrize("content", [b"", b"\xff\xfe\x01", b"\x80", b"a\x00b", b"  \n ", bytes(4)])
def test_what_tells_nothing_is_left_unnamed(content):
    assert sniff(content) is None


@QUIET
@given(st.integers(0, 5), st.integers(0, 60))
def test_a_safetensors_file_is_never_taken_for_something_else(count, stop):
    tensors = random_tensors(1, {f"layers.{i}.weight": (2, 3) for i in range(count)})
    assert sniff(safetensors_bytes(tensors)[: 8 + stop]) is None


@QUIET
@given(st.binary(max_size=600))
def test_any_bytes_can_be_sniffed(data):
    sniff(data)
