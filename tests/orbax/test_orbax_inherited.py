"""The tests that the Orbax wheel ships, run against lcjax.

Three things are inherited: the tests of ``checkpointer_test_utils`` (of a ``Checkpointer`` and an
``AsyncCheckpointer`` with the PyTree handler), the trees of ``test_tree_utils`` with what is
expected of each, and checkpoints that older releases of Orbax wrote. The wheel's other test
modules hold helpers only, or test its v1 interface or its emergency manager.
"""

from pathlib import Path

import pytest
from orbax_helpers import cases_on_eight_devices

# Tests of the wheel that lcjax can't pass, by the start of their names.
CANNOT_PASS = {
    "test_memory_limiting": (
        "patches the limiter of bytes in flight inside Orbax's array handler, which lcjax does "
        "not use"
    ),
    "test_save_with_failing_array_metadata_store_in_finalize": (
        "patches the store of array metadata inside Orbax's array handler; lcjax keeps its "
        "metadata in the manifest"
    ),
    "test_composite_handler_metadata": (
        "expects Orbax's handler by name in the step's metadata, where lcjax names itself"
    ),
}

# What a test of the wheel expects in an error's text -> how lcjax says the same.
WORDINGS = {
    "User-provided restore item and on-disk value": "do not have the same leaves",
}

# Trees that Orbax refuses to save and lcjax saves.
SAVED_BY_US = {"empty_pytree": "an empty tree is a tree: it comes back as itself"}

SKIPPED = {
    "test_memory_limiting0",
    "test_memory_limiting1",
    "test_save_with_failing_array_metadata_store_in_finalize",
    "test_composite_handler_metadata",
}


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    """Runs the cases once; class and name of each -> passed, skipped or its failure."""
    report = tmp_path_factory.mktemp("inherited") / "report.xml"
    return cases_on_eight_devices(Path(__file__).parent / "parity_inherited.py", report)


def of(cases, cls):
    return {name: results for (found, name), results in cases.items() if found == cls}


@pytest.mark.parametrize("cls", ["TestCheckpointer", "TestAsyncCheckpointer"])
class TestTheTestsOfTheWheel:
    def test_they_pass(self, cases, cls):
        ours = of(cases, cls)
        failures = {n: r for n, r in ours.items() if any(isinstance(x, str) for x in r)}
        assert not failures, "\n".join(map(str, failures.items()))
        passed = {name for name, results in ours.items() if not results}
        assert passed | SKIPPED == {*ours}
        assert len(passed) >= 20

    def test_only_what_is_listed_is_skipped_with_its_reason(self, cases, cls):
        skipped = {
            name: r[0][1] for name, r in of(cases, cls).items() if r and r[0][0] == "skipped"
        }
        assert {*skipped} == SKIPPED
        for name, reason in skipped.items():
            assert reason in [r for start, r in CANNOT_PASS.items() if name.startswith(start)]


def test_the_trees_and_checkpoints_of_the_wheel(cases):
    ours = of(cases, "parity_inherited")
    assert sum(name.startswith("test_trees") for name in ours) >= 2 * 30
    assert sum(name.startswith("test_checkpoints") for name in ours) >= 20
    assert not {name: results for name, results in ours.items() if results}
