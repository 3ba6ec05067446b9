"""The tests of ``training.Checkpointer`` that the Orbax wheel ships, with lcjax installed.

They need eight devices, as do the cases of sharded arrays; ``test_orbax_v1.py`` runs both in a
process of their own.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl import flags
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from orbax.checkpoint import v1 as ocp
from orbax.checkpoint.experimental.v1._src.training import checkpointer_test_base
from orbax_helpers import same
from test_orbax_v1 import CANNOT_PASS, SYNCHRONOUS

import lcjax
from lcjax.chain import MANIFEST_FILE

flags.FLAGS.mark_as_parsed()

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


class TestCheckpointer(checkpointer_test_base.CheckpointerTestBase.Test):
    def setUp(self):
        name = self.id().rpartition(".")[2]
        if name in CANNOT_PASS:
            self.skipTest(CANNOT_PASS[name])
        lcjax.install("lossless")
        self.addCleanup(lcjax.uninstall)
        self.addCleanup(self._check_who_wrote)
        if name in SYNCHRONOUS:
            context = ocp.Context()
            context.asynchronous.create_directories_asynchronously = False
            self.enter_context(context)
        super().setUp()

    def _check_who_wrote(self):
        for item in self.directory.glob("*/state"):
            assert (item / MANIFEST_FILE).exists(), f"{item} was not written by lcjax"


class TestSharded:
    @pytest.fixture
    def mesh(self):
        assert jax.device_count() == 8
        return Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))

    @pytest.fixture
    def state(self, mesh):
        x = jnp.arange(64 * 48, dtype=jnp.float32).reshape(64, 48) / 1000
        return {
            "both": jax.device_put(x, NamedSharding(mesh, P("data", "model"))),
            "rows": jax.device_put(x, NamedSharding(mesh, P("data"))),
            "single": jax.device_put(x, SingleDeviceSharding(jax.devices()[3])),
            "key": jax.device_put(jax.random.key(1), NamedSharding(mesh, P())),
        }

    @pytest.fixture(autouse=True)
    def saved(self, tmp_path, state):
        lcjax.install("lossless")
        with ocp.training.Checkpointer(tmp_path) as checkpointer:
            for step in range(2):
                checkpointer.save(step, state)
            yield checkpointer
        lcjax.uninstall()

    def check(self, restored, state, shardings):
        same(restored, state)
        for name, sharding in shardings.items():
            found = restored[name].sharding
            assert found.is_equivalent_to(sharding, restored[name].ndim), (name, found)

    def test_without_a_target_the_saved_shardings_come_back(self, saved, state):
        self.check(saved.load(1), state, {name: leaf.sharding for name, leaf in state.items()})

    def test_from_the_metadata_too(self, saved, state):
        target = saved.metadata(1).metadata
        assert target["rows"].sharding.is_equivalent_to(state["rows"].sharding, 2)
        shardings = {name: leaf.sharding for name, leaf in state.items() if name != "key"}
        self.check(saved.load(1, target), state, shardings)

    def test_the_targets_sharding_wins(self, saved, state, mesh):
        other = NamedSharding(mesh, P(None, ("model", "data")))
        target = {
            name: jax.ShapeDtypeStruct(
                leaf.shape, leaf.dtype, sharding=other if leaf.ndim else None
            )
            for name, leaf in state.items()
        }
        self.check(saved.load(0, target), state, dict.fromkeys(("both", "rows", "single"), other))
