"""The table of operators, and what every one of them must say of itself."""

import pytest

from mergepipe.errors import InternalError
from mergepipe.operators.contract import Operator
from mergepipe.operators.registry import operator, operators, signatures
from mergepipe.signatures import COMMON_PARAMS


def test_every_operator_is_found_under_the_name_in_its_signature():
    assert {name: op.signature.name for name, op in operators().items()} == {name: name for name in operators()}
    assert signatures() == {name: op.signature for name, op in operators().items()}


def test_an_operator_that_there_is_not_is_an_error_of_the_program():
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
def test_an_operator_that_may_reduce_has_a_reduction(name):
    kind = type(operators()[name])
    assert (kind.reduces is not Operator.reduces) == (kind.reduce is not Operator.reduce)


def test_an_operator_without_a_reduction_says_so():
    linear = operators()["linear"]
    assert not linear.reduces(None, None)
    with pytest.raises(NotImplementedError, match="linear has no reduction"):
        linear.reduce(None, None, ())
