"""The columns of the table that need eight devices; ``test_orbax_parity.py`` runs them."""

import parity_table as table
import pytest

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sharding info not provided"),
    # Where Orbax gives up in the middle of reading, that is reported later.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

LEAVES, SPREAD, COLUMNS = table.leaves(), table.sharded_leaves(), table.sharded_columns()
BACK = {name: table.COLUMNS[name] for name in ("without", "shape_only", "sharding", "pinned_host")}


@pytest.fixture(scope="module")
def pair():
    made = table.Pair()
    yield made
    made.close()


@pytest.mark.parametrize(("name", "column"), table.cells(LEAVES, COLUMNS, LEAVES, COLUMNS))
def test_onto_eight_devices(pair, name, column):
    table.check_cell(pair, name, LEAVES[name], column, COLUMNS[column])


@pytest.mark.parametrize(
    ("name", "column"), table.cells(SPREAD, {**BACK, **COLUMNS}, SPREAD, {**BACK, **COLUMNS})
)
def test_from_eight_devices(pair, name, column):
    table.check_cell(pair, f"spread_{name}", SPREAD[name], column, {**BACK, **COLUMNS}[column])
