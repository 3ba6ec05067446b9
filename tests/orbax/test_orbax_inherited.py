"""The tests that the Orbax wheel ships, run against lcjax.

Three things are inherited: the tests of ``checkpointer_test_utils`` (of a ``Checkpointer`` and an
``AsyncCheckpointer`` with the PyTree handler), the trees of ``test_tree_utils`` with what is
expected of each, and checkpoints that older releases of Orbax wrote. The wheel's other test
modules hold helpers only, or test its v1 interface or its emergency manager.
"""

import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

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
    here = Path(__file__).parent
    report = tmp_path_factory.mktemp("inherited") / "report.xml"
    env = {
        **os.environ,
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join([p for p in sys.path if p]),
    }
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", f"--junit-xml={report}"]
    done = subprocess.run(
        [*command, str(here / "parity_inherited.py"), "-p", "no:cacheprovider"],
        env=env,
        cwd=here,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert report.exists(), done.stdout[-4000:] + done.stderr[-4000:]
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        failures = [e.text for e in case if e.tag in ("failure", "error")]
        skips = [e.get("message") for e in case if e.tag == "skipped"]
        key = (case.get("classname").rpartition(".")[2], case.get("name"))
        # A test with failing subtests has several entries.
        found.setdefault(key, []).extend(failures or [("skipped", s) for s in skips])
    return found


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
