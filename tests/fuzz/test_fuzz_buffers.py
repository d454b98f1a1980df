"""Any object in any argument of any public call: an error of the API, or TypeError; no crash."""

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import kvpool
from tests.hostile import OBJECTS, attempt, calls, still_works
from tests.pools import ROOT, run_python

pytestmark = pytest.mark.filterwarnings("ignore:nanobind")


def test_each_object_in_each_argument_in_a_process_of_its_own() -> None:
    code, out, err = run_python(
        "import runpy, sys; sys.argv = ['hostile']; "
        "runpy.run_module('tests.hostile', run_name='__main__')",
        timeout_s=120,
    )
    lines = out.splitlines()
    # A crash leaves no Python exception: the last line says in which case it was.
    assert code == 0, f"ended with {code} at {lines[-1] if lines else 'the start'}\n{err}"
    assert err == ""
    assert int(lines[-1].removesuffix(" calls")) == len(lines) - 1 > 8000


@pytest.fixture(scope="module")
def pool() -> Iterator[kvpool.Pool]:
    with kvpool.open("4MiB", dram_max="64MiB", prefault="off") as pool:
        yield pool


@settings(max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_several_hostile_arguments_at_once(pool: kvpool.Pool, data: st.DataObject) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        table = calls(pool)
        name = data.draw(st.sampled_from(sorted(table)))
        call, arguments = table[name]
        for argument in arguments:
            if data.draw(st.booleans()):
                arguments[argument] = OBJECTS[data.draw(st.sampled_from(sorted(OBJECTS)))]()
        attempt(call, arguments)
        still_works(pool)


def test_arguments_that_do_not_exist_are_told(pool: kvpool.Pool) -> None:
    for name, (call, arguments) in calls(pool).items():
        wrong: dict[str, Any] = {**arguments, "no_such_argument": 1}
        with pytest.raises(TypeError) as caught:
            call(**wrong)
        assert caught.value, name


def test_the_tests_own_folder_is_the_one_under_test() -> None:
    assert kvpool.__file__ is not None
    assert str(ROOT) in kvpool.__file__
