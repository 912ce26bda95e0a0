"""The table of operators: what runs, what can only be declared, and what every one of them must say of itself."""

import pytest

from mergepipe.errors import InternalError
from mergepipe.operators.registry import operator, operators, signatures
from mergepipe.signatures import COMMON_PARAMS


def test_every_operator_is_found_under_the_name_in_its_signature():
    assert {name: op.signature.name for name, op in operators().items()} == {name: name for name in operators()}
    assert set(operators()) == {name for name, signature in signatures().items() if signature.available}


def test_what_cannot_run_yet_can_be_declared_and_is_not_available():
    waiting = set(signatures()) - set(operators())
    assert not any(signatures()[name].available for name in waiting)


def test_an_operator_that_cannot_run_never_reaches_the_planner():
    with pytest.raises(InternalError, match="`unknown`"):
        operator("unknown")


@pytest.mark.parametrize("name", sorted(signatures()))
def test_a_signature_documents_its_parameters_and_shadows_no_common_one(name):
    signature = signatures()[name]
    assert signature.summary
    assert all(spec.doc for spec in signature.params)
    common = {spec.name for spec in COMMON_PARAMS}
    assert not common & {spec.name for spec in signature.params}


@pytest.mark.parametrize("name", sorted(operators()))
def test_an_operator_that_runs_has_a_version_and_a_docstring(name):
    assert operators()[name].version >= 1
    assert operators()[name].__doc__


@pytest.mark.parametrize("name", sorted(operators()))
def test_an_operator_without_a_reduction_says_so(name):
    if not operators()[name].reduces:
        with pytest.raises(NotImplementedError):
            operators()[name].partial(None, None)
        with pytest.raises(NotImplementedError):
            operators()[name].reduce((), None)
