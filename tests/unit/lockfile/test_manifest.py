"""The manifest: round trip, self-consistency, size, and no traceback on garbage."""

import contextlib
import dataclasses
import json
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.quick import examples
from unit.lockfile.samples import ASSISTANT, MANIFEST, STAGED, check_golden, digest, manifests

from mergepipe.digest import DIGEST_SIZE, content_digest, format_digest, source_digest, tensor_digest
from mergepipe.errors import InternalError, LockError
from mergepipe.lockfile.manifest import (
    INPUT_DIGEST_SIZE,
    MANIFEST_VERSION,
    ManifestInput,
    ManifestTensor,
    parse_manifest,
    render_manifest,
    truncate_digests,
)
from mergepipe.lockfile.records import LockedTensor

PATH = Path("build/assistant/mergepipe.json")
DATA = render_manifest(MANIFEST)


def refused(data):
    """Return the message that parsing ends with; it must name the file."""
    with pytest.raises(LockError) as caught:
        parse_manifest(data, PATH)
    assert caught.value.exit_status == 2
    assert str(PATH) in caught.value.message
    return caught.value.message


def edited(edit):
    """Return the sample's bytes after ``edit`` changed its JSON data."""
    data = json.loads(DATA)
    edit(data)
    return json.dumps(data).encode()


def test_the_golden_manifest_is_rendered_byte_for_byte():
    check_golden("mergepipe.json", DATA)
    check_golden("stages.json", render_manifest(STAGED))


def test_the_sample_reads_back():
    assert parse_manifest(DATA, PATH) == MANIFEST
    assert parse_manifest(render_manifest(STAGED), PATH) == STAGED


def test_what_stands_before_a_stage_is_not_said_again():
    data = json.loads(render_manifest(STAGED))
    (stage,) = data["stages"]
    assert stage["output"]["path"] is None
    *_, norm = stage["tensors"]
    assert [list(given) for given in norm["inputs"]] == [["source", "digest"]]  # `math` of the output has these bytes
    assert [list(given) for given in stage["tensors"][0]["inputs"]] == [["source", "digest", "blocks"]] * 3
    assert all("blocks" not in tensor for tensor in stage["tensors"])


@settings(deadline=None)
@given(manifests())
def test_a_manifest_reads_back_as_it_was_and_renders_the_same(manifest):
    data = render_manifest(manifest)
    assert parse_manifest(data, PATH) == manifest
    assert render_manifest(parse_manifest(data, PATH)) == data


def test_it_is_json_with_the_small_parts_first_and_a_line_per_tensor():
    data = json.loads(DATA)
    assert next(iter(data)) == "version"
    assert list(data)[-2:] == ["tensors", "checksum"]
    lines = DATA.decode().splitlines()
    for tensor in MANIFEST.tensors:
        (line,) = [line for line in lines if f'"name":"{tensor.name}"' in line]
        assert json.loads(line.rstrip(","))["digest"].startswith("b3:")
    assert '    "operator": "ties",' in lines


def test_equal_parameter_sets_are_stored_once_and_unequal_types_apart():
    data = json.loads(DATA)
    assert len(data["parameters"]) == 2
    assert [tensor["parameters"] for tensor in data["tensors"]] == [0, 0, 1, None]
    first, second, *rest = MANIFEST.tensors
    as_flag = dataclasses.replace(second.parameters, params={"lambda": True, "normalize": True})
    manifest = dataclasses.replace(MANIFEST, tensors=(first, dataclasses.replace(second, parameters=as_flag), *rest))
    assert len(json.loads(render_manifest(manifest))["parameters"]) == 3


def test_input_digests_keep_their_first_16_bytes():
    packed = digest("a") + digest("b")
    assert truncate_digests(packed) == digest("a")[:16] + digest("b")[:16]
    assert truncate_digests(b"") == b""
    assert INPUT_DIGEST_SIZE == 16


def test_access_is_full_or_one_level_per_expert_and_block():
    access = [tensor["access"] for tensor in json.loads(DATA)["tensors"]]
    assert access == ["full", "full", {"levels": "/wA="}, "full"]


def test_levels_that_spell_full_in_base64_stay_levels():
    levels = bytes([0x7E, 0xE9, 0x65, 0])  # "full" is also the base64 of the first three
    first, *rest = MANIFEST.tensors
    manifest = dataclasses.replace(MANIFEST, tensors=(dataclasses.replace(first, levels=levels), *rest))
    assert parse_manifest(render_manifest(manifest), PATH) == manifest


def test_a_large_manifest_stays_small():
    """A tenth of 70B parameters in 8 experts: 26,700 blocks of 2^18 elements, in 72 tensors; 10 MB at most."""
    tensors, results = [], []
    for index in range(72):
        packed = b"".join(digest(f"{index}.{block}") for block in range(371))
        name, shape = f"model.layers.{index}.weight", (371 * 32, 8192)
        content = tensor_digest("BF16", shape, packed)
        inputs = tuple(
            ManifestInput(source=f"s{source}", digest=content, blocks=truncate_digests(packed)) for source in range(9)
        )
        tensors.append(
            ManifestTensor(
                name=name,
                dtype="BF16",
                shape=shape,
                decision="merge",
                parameters=None,
                inputs=inputs,
                blocks=packed,
                levels=bytes(2 * 371),
            )
        )
        results.append(LockedTensor(name=name, digest=content, read=0, total=742))
    output = dataclasses.replace(
        ASSISTANT, tensors=tuple(results), digest=source_digest((result.name, result.digest) for result in results)
    )
    names = tuple(tensor.name for tensor in tensors)
    manifest = dataclasses.replace(MANIFEST, output=output, tensors=tuple(tensors), shard_tensors=(names, ()))
    data = render_manifest(manifest)
    assert len(data) < 10_000_000
    assert parse_manifest(data, PATH) == manifest


@pytest.mark.parametrize("version", [MANIFEST_VERSION + 1, 0])
def test_another_version_is_refused_with_both_versions(version):
    with pytest.raises(LockError, match=rf"version {version}, and this mergepipe reads version 1") as caught:
        parse_manifest(json.dumps({"version": version, "all": "else"}).encode(), PATH)
    assert ("upgrade" in (caught.value.hint or "")) == (version > MANIFEST_VERSION)


@pytest.mark.parametrize(
    ("edit", "problem"),
    [
        (lambda d: d.pop("run"), "`run`"),
        (lambda d: d.update(extra=1), "`extra`"),
        (lambda d: d["output"].update(operator=1), "$.output.operator"),
        (lambda d: d["tensors"][1].pop("digest"), "$.tensors[1]"),
        (lambda d: d["tensors"][1].update(digest="b3:12"), "$.tensors[1].digest"),
        (lambda d: d["tensors"][1].update(blocks="?"), "$.tensors[1].blocks"),
        (lambda d: d["tensors"][1].update(shape=[-1]), "$.tensors[1].shape[0]"),
        (lambda d: d["tensors"][1].update(access="half"), "$.tensors[1].access"),
        (lambda d: d["tensors"][1].update(parameters=2), "parameter set 2 of 2"),
        (lambda d: d["tensors"][1].update(dtype="BF8"), "unknown dtype `BF8`"),
        (lambda d: d["tensors"][1].update(shape=[1]), "digest is not that of its blocks"),
        (lambda d: d["tensors"][1].update(blocks=d["tensors"][0]["blocks"]), "digest is not that of its blocks"),
        (lambda d: d["tensors"][1].update(blocks="AAAA"), "digest is not that of its blocks"),
        (lambda d: d["tensors"][1]["inputs"][2].update(blocks="AAAA"), "`code` have 3 bytes"),
        (lambda d: d["tensors"][2]["access"].update(levels="AAAA"), "3 access levels for 2 experts of 1 block"),
        (lambda d: d["tensors"][1]["expert_blocks"].update(read=9), "9 of 8 expert blocks"),
        (lambda d: d["tensors"].pop(), "digest of the output"),
        (lambda d: d.update(digest=d["sources"][0]["digest"]), "digest of the output"),
        (lambda d: d["shards"][0]["tensors"].pop(), "each tensor once"),
        (lambda d: d["shards"][0]["tensors"].append("lm_head.weight"), "each tensor once"),
        (lambda d: d["files"].append("README.md"), "twice"),
        (lambda d: d["files"].remove("config.json"), "`config.json` is not among the files"),
        (lambda d: d.pop("checksum"), "`checksum`"),
        (lambda d: d["files"].remove("README.md"), "`README.md` is not among the files"),
        (lambda d: d["sources"][0]["location"].update(url="x"), "unknown keys"),
        (lambda d: d["bound"].update(slack=1), "`slack`"),
    ],
)
def test_what_is_wrong_is_named(edit, problem):
    assert problem in refused(edited(edit))


@pytest.mark.parametrize(
    "name", ["", "/etc/passwd", "../x", "a/../../x", "a//b", "./x", "..\\x", "C:\\x", "C:x", "a\0"]
)
def test_files_outside_the_output_are_refused(name):
    assert "file name inside the output" in refused(edited(lambda data: data["files"].append(name)))


@pytest.mark.parametrize(
    "data", [b"", b"null", b"[]", b"{}", b"\xff\xfe", b"[" * 100_000, b'{"version": 1}', b'{"version": "1"}']
)
def test_garbage_is_refused(data):
    refused(data)


def test_an_integer_of_thousands_of_digits_is_refused():
    refused(b'{"version": ' + b"9" * 5000 + b"}")


def test_data_that_is_nested_without_end_is_refused():
    assert "nested too deeply" in refused(b'{"version": 1, "extra": ' + b"[" * 200_000)


@settings(deadline=None, max_examples=examples(300))
@given(st.data())
def test_flipped_bits_and_cuts_never_end_in_anything_but_a_lock_error(data):
    raw = bytearray(DATA)
    for _ in range(data.draw(st.integers(0, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    if data.draw(st.booleans()):
        del raw[data.draw(st.integers(0, len(raw))) :]
    with contextlib.suppress(LockError):
        parse_manifest(bytes(raw), PATH)


@pytest.mark.parametrize(
    ("edit", "problem"),
    [
        (lambda d: d["stages"].clear(), "`assistant` is an output that is not among the stages before it"),
        (lambda d: d["stages"].append(d["stages"][0]), "two outputs called `assistant`"),
        (lambda d: d["stages"][0]["output"].update(name="blend"), "two outputs called `blend`"),
        (lambda d: d["sources"][0]["location"].update(output="other"), "not among the stages"),
        (lambda d: d["stages"][0]["sources"].append(d["sources"][0]), "the digests of its sources"),
        (lambda d: d["stages"][0]["sources"][2].update(tensors=5), "`math` is described in two ways"),
        (
            lambda d: d["stages"][0]["tensors"][0].update(digest="b3:" + "0" * 64),
            "its digest is not that of its tensors",
        ),
        (lambda d: d["stages"][0].update(digest=None), "it has no digest"),
        (lambda d: d["stages"][0].update(digest="b3:" + "0" * 64), "its digest is not that of its tensors"),
        (lambda d: d["stages"][0]["tensors"][0].update(parameters=9), "parameter set 9 of"),
        (lambda d: d["stages"][0]["tensors"][0].update(dtype="X"), "unknown dtype"),
        (lambda d: d["places"][0].update(name="math"), "among the places"),
        (lambda d: d["places"][0]["location"].update(url="x"), "unknown keys"),
        (lambda d: d["tensors"][0]["inputs"][0].pop("blocks"), "the block digests of `assistant` are missing"),
        (lambda d: d["output"].update(path=None), "has no path"),
        (lambda d: d["output"]["sources"].update(more=d["digest"]), "the digests of the sources"),
    ],
)
def test_what_is_wrong_with_stages_is_named(edit, problem):
    data = json.loads(render_manifest(STAGED))
    edit(data)
    assert problem in refused(json.dumps(data).encode())


@pytest.mark.parametrize("cut", [1, 2, 100, len(DATA) // 2])
def test_a_truncated_manifest_is_refused(cut):
    refused(DATA[:-1])
    refused(DATA[: -1 - cut])


def test_the_checksum_is_that_of_every_byte_before_its_line():
    body, line = DATA[: DATA.rindex(b'  "checksum"')], DATA.splitlines()[-2].decode()
    assert line == f'  "checksum": "{format_digest(content_digest(body))}"'


@pytest.mark.parametrize("at", [*range(0, len(DATA), 97), *range(len(DATA) - 90, len(DATA))])
def test_a_flipped_bit_anywhere_is_found(at):
    raw = bytearray(DATA)
    raw[at] ^= 1
    refused(bytes(raw))


def test_a_change_that_contradicts_nothing_is_found_by_the_checksum_alone():
    data = DATA.replace(b'"expert_bytes_read": 6162432', b'"expert_bytes_read": 6162433')
    assert "changed after it was written" in refused(data)
    assert parse_manifest(data, PATH, unchanged=False).run.expert_bytes_read == 6_162_433


@pytest.mark.parametrize("index", range(4))
def test_a_flipped_bit_in_an_output_digest_is_found(index):
    tensor = json.loads(DATA)["tensors"][index]
    for text in (tensor["blocks"][:-2], tensor["digest"]):
        at = DATA.index(text.encode()) + len(text) // 2
        other = b"0" if DATA[at : at + 1] != b"0" else b"1"
        refused(DATA[:at] + other + DATA[at + 1 :])


def test_a_manifest_that_contradicts_itself_is_not_written():
    def broken(**changes):
        return pytest.raises(InternalError, match="`assistant` contradicts itself"), dataclasses.replace(
            MANIFEST, **changes
        )

    for raises, manifest in (
        broken(tensors=MANIFEST.tensors[1:]),
        broken(shard_tensors=MANIFEST.shard_tensors[1:]),
        broken(files=("../mergepipe.json", *MANIFEST.files)),
    ):
        with raises:
            render_manifest(manifest)


def test_numbers_that_json_lacks_are_not_written():
    for changes in (
        {"params": {"lambda": float("nan")}},
        {"params": {"lambda": (1.0, float("inf"))}},
        {"bound": {"kind": "certified", "absolute": float("inf")}},
    ):
        with pytest.raises(InternalError, match="cannot be written"):
            render_manifest(dataclasses.replace(MANIFEST, output=dataclasses.replace(ASSISTANT, **changes)))
    with pytest.raises(InternalError, match="slack"):
        render_manifest(dataclasses.replace(MANIFEST, output=dataclasses.replace(ASSISTANT, bound={"slack": 1.0})))
    first, *rest = MANIFEST.tensors
    odd = dataclasses.replace(first, parameters=dataclasses.replace(first.parameters, params={"x": float("nan")}))
    with pytest.raises(InternalError, match="cannot be written"):
        render_manifest(dataclasses.replace(MANIFEST, tensors=(odd, *rest)))


def test_a_name_that_is_not_unicode_is_refused_with_its_name():
    files = (*MANIFEST.files, b"\xff".decode("utf-8", "surrogateescape"))
    with pytest.raises(LockError, match=re.escape(r"'\udcff' is not valid Unicode")):
        render_manifest(dataclasses.replace(MANIFEST, files=files))


def test_block_digests_unpack_to_the_digests_that_were_packed():
    assert len(MANIFEST.tensors[1].blocks) == 4 * DIGEST_SIZE
