"""The pure functions: encoder and decoder agree for ever, and bad messages are refused."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import lcjax
from lcjax import boxes, container


def leaves_equal(a, b):
    """Bit for bit, dtype for dtype, type for type."""
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        if isinstance(x, jax.Array) and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        assert type(x) is type(y)
        if hasattr(x, "dtype"):
            assert x.dtype == y.dtype
            assert x.shape == y.shape
            assert np.asarray(x).tobytes() == np.asarray(y).tobytes()
        else:
            assert x == y or x != x
    return True


def train_state(rng, step=0):
    params = {
        "dense": {
            "kernel": jnp.asarray(rng.standard_normal((60, 70)), jnp.float32),
            "bias": jnp.zeros(70, jnp.float32),
        },
        "half": jnp.asarray(rng.standard_normal(500), jnp.bfloat16),
        "scale": jnp.float32(1.5),
    }
    return {
        "params": params,
        "opt_state": optax.adamw(1e-3).init(params),
        "step": step,
        "rng": jax.random.key(step),
    }


def trained(state, rng, size=0.01):
    """The next state: noise on floating leaves, the step counted up."""

    def move(x):
        if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jnp.floating):
            return x + jnp.asarray(size * rng.standard_normal(x.shape), x.dtype)
        return x

    moved = jax.tree.map(move, state)
    return {**moved, "step": state["step"] + 1, "rng": jax.random.key(state["step"] + 1)}


@pytest.mark.parametrize(
    "options",
    [
        {"preset": "lossless"},
        {"preset": "paper"},
        {"preset": "paper", "bits": 2, "scope": "leaf"},
    ],
)
def test_fifty_saves_leave_encoder_and_decoder_with_the_same_state(options):
    rng = np.random.default_rng(0)
    state = train_state(rng)
    sent = received = None
    for _ in range(50):
        message, sent = lcjax.encode(state, sent, **options)
        received = lcjax.decode(message, received)
        assert received.id == sent.id
        assert leaves_equal(received.as_tree(state), sent.as_tree(state))
        if options["preset"] == "lossless":
            assert leaves_equal(received.as_tree(state), state)
        else:
            exact = {k: v for k, v in state.items() if k != "params"}
            assert leaves_equal(received.as_tree(state)["opt_state"], exact["opt_state"])
        state = trained(state, rng)


def test_error_does_not_accumulate():
    rng = np.random.default_rng(1)
    w = rng.standard_normal(20_000).astype(np.float32)
    _, ref = lcjax.encode({"w": w}, preset="paper")
    errors = []
    for _ in range(60):
        w = w + np.float32(0.01) * rng.standard_normal(w.size).astype(np.float32)
        _, ref = lcjax.encode({"w": w}, ref)
        errors.append(float(np.linalg.norm(w - ref.tree["w"])))
    assert max(errors[30:]) < 1.5 * max(errors[:30])


def test_delta_is_smaller_than_key_frame_and_says_what_was_lost():
    rng = np.random.default_rng(2)
    state = {"w": jnp.asarray(rng.standard_normal(100_000), jnp.float32)}
    key, ref = lcjax.encode(state, preset="paper")
    delta, ref = lcjax.encode(trained({**state, "step": 0}, rng) | {"w": state["w"] + 1e-3}, ref)
    assert len(delta) < len(key) / 10
    assert 0 <= ref.fidelity["relative_error"] < 1
    assert lcjax.decode(key).fidelity is None


def test_without_target_plain_containers_come_back():
    tree = {"a": (1, 2.5, [True, None]), "e": {}, "k": jax.random.key(3), "d": {7: np.int8([1, 2])}}
    message, ref = lcjax.encode(tree, preset="lossless")
    for got in (ref.tree, lcjax.decode(message).tree):
        assert got["a"] == [1, 2.5, [True, None]]
        assert type(got["a"][2][0]) is bool
        assert got["e"] == {}
        assert got["k"] == tree["k"]
        assert got["d"][7].dtype == np.int8


def test_forgetting_a_reference_changes_nothing():
    rng = np.random.default_rng(3)
    a, b, c = ({"w": rng.standard_normal(1000).astype(np.float32) * 0.01 + 5} for _ in range(3))
    _, ref = lcjax.encode(a, preset="paper")
    lcjax.encode(b, ref)
    message, _ = lcjax.encode(c, ref)
    again, _ = lcjax.encode(c, ref)
    assert message == again


def test_a_message_on_another_base_is_refused():
    rng = np.random.default_rng(4)
    state = train_state(rng)
    key, ref0 = lcjax.encode(state, preset="paper")
    first, ref1 = lcjax.encode(trained(state, rng, 1e-3), ref0)
    second, _ = lcjax.encode(trained(state, rng, 2e-3), ref1)
    with pytest.raises(lcjax.BaseMismatchError, match=f"delta on state {ref1.id}.*{ref0.id}"):
        lcjax.decode(second, ref0)
    with pytest.raises(lcjax.BaseMismatchError, match="reference is none"):
        lcjax.decode(first)
    assert lcjax.decode(key, ref1).id == ref0.id  # a key frame needs no base


def test_presets_must_be_named():
    with pytest.raises(lcjax.PresetError, match="no default"):
        lcjax.encode({"w": np.zeros(3)})
    with pytest.raises(lcjax.PresetError, match="unknown preset 'zip'; choose one of 'lossless'"):
        lcjax.encode({"w": np.zeros(3)}, preset="zip")
    with pytest.raises(lcjax.PresetError, match="a preset is a name or an lcjax.Preset, got 3"):
        lcjax.encode({"w": np.zeros(3)}, preset=3)
    with pytest.raises(lcjax.PresetError, match="bits must be an int from 1 to 8, got 9"):
        lcjax.encode({"w": np.zeros(3)}, preset="paper", bits=9)
    with pytest.raises(lcjax.PresetError, match="neither bits nor scope"):
        lcjax.encode({"w": np.zeros(3)}, preset="lossless", bits=3)


@pytest.mark.parametrize("preset", ["paper", "lossless"])
def test_leaves_may_come_go_and_change(preset):
    rng = np.random.default_rng(5)

    def array(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    trees = [
        {"a": array(100), "b": array(50)},
        {"a": array(100), "b": array(5, 10)},
        {"a": array(100), "c": array(30), "b": array(5, 10)},
        {"c": array(30)},
        {"a": array(100), "c": array(30)},
        {"a": array(100).astype(np.float64), "c": array(30)},
        {},
        {"a": array(100)},
    ]
    sent = received = None
    for tree in trees:
        message, sent = lcjax.encode(tree, sent, preset=preset)
        received = lcjax.decode(message, received)
        assert leaves_equal(received.as_tree(tree), sent.as_tree(tree))
        if preset == "lossless":
            assert leaves_equal(received.as_tree(tree), tree)


def test_presets_may_change_along_a_chain():
    rng = np.random.default_rng(6)
    state = train_state(rng)
    sent = received = None
    for preset in ["paper", "paper", "lossless", "paper", "lossless", "lossless", "paper"]:
        message, sent = lcjax.encode(state, sent, preset=preset)
        received = lcjax.decode(message, received)
        assert leaves_equal(received.as_tree(state), sent.as_tree(state))
        if preset == "lossless":
            assert leaves_equal(received.as_tree(state), state)
        state = trained(state, rng)


@pytest.mark.parametrize("preset", ["paper", "lossless"])
def test_values_that_are_not_finite(preset):
    rng = np.random.default_rng(7)
    w = rng.standard_normal(1000).astype(np.float32)
    sent = received = None
    for k in range(6):
        bad = w.copy()
        bad[k * 10 : k * 10 + 4] = [np.nan, np.inf, -np.inf, 3e38]
        message, sent = lcjax.encode({"w": bad}, sent, preset=preset)
        received = lcjax.decode(message, received)
        got = received.tree["w"]
        assert got.tobytes() == sent.tree["w"].tobytes()
        assert np.array_equal(np.isfinite(got), np.isfinite(bad))
        special = ~np.isfinite(bad)
        assert got[special].tobytes() == bad[special].tobytes()
        w = w + np.float32(0.01) * rng.standard_normal(w.size).astype(np.float32)


def test_layouts_of_numpy_arrays_do_not_matter():
    base = np.arange(24, dtype=np.float32).reshape(4, 6)
    variants = [base, np.asfortranarray(base), base.astype(">f4"), np.repeat(base, 2, 1)[:, ::2]]
    messages = {lcjax.encode({"w": v}, preset="lossless")[0] for v in variants}
    assert len(messages) == 1
    assert np.array_equal(lcjax.decode(messages.pop()).tree["w"], base)


def test_large_leaves_are_cut_into_chunks(monkeypatch):
    monkeypatch.setattr(boxes, "CHUNK_ELEMENTS", 100)
    monkeypatch.setattr(boxes.split, "__defaults__", (100,))
    rng = np.random.default_rng(8)
    tree = {"w": rng.standard_normal((7, 50)).astype(np.float32), "m": np.zeros((3, 200), "i4")}
    sent = received = None
    for _ in range(4):
        message, sent = lcjax.encode(tree, sent, preset="paper")
        received = lcjax.decode(message, received)
        assert received.tree["w"].tobytes() == sent.tree["w"].tobytes()
        assert np.array_equal(received.tree["m"], tree["m"])
        tree = {**tree, "w": tree["w"] + np.float32(0.001)}
    inner = container.from_bytes(container.from_bytes(message).chunk(0))
    assert [len(leaf["chunks"]) for leaf in inner.meta["leaves"]] == [6, 4]


def test_memory_is_bounded_by_the_limit():
    message, _ = lcjax.encode({"w": np.zeros(1 << 22, np.float32)}, preset="lossless")
    assert len(message) < 1000
    with pytest.raises(lcjax.CorruptDataError, match="more than 1000000 bytes.*target"):
        lcjax.decode(message, max_bytes=1_000_000)


def test_a_target_of_another_shape_is_refused():
    message, _ = lcjax.encode({"w": np.zeros(3)}, preset="lossless")
    ref = lcjax.decode(message)
    with pytest.raises(lcjax.TreeMismatchError, match=r"'w'.*\(3,\).*\(4,\)"):
        ref.as_tree({"w": np.zeros(4)})
    with pytest.raises(lcjax.TreeMismatchError, match="'v'"):
        ref.as_tree({"v": np.zeros(3)})


def test_references_do_not_follow_arrays_changed_in_place():
    w = np.ones(1000, np.float32)
    message, ref = lcjax.encode({"w": w}, preset="paper")
    w[:] = 7
    assert np.all(ref.tree["w"] == 1)
    delta, _ = lcjax.encode({"w": np.full(1000, 1.5, np.float32)}, ref)
    assert np.all(lcjax.decode(delta, lcjax.decode(message)).tree["w"] == 1.5)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_damaged_messages_never_pass(data):
    message, ref0 = lcjax.encode({"w": np.arange(300, dtype=np.float32), "n": 3}, preset="paper")
    delta, _ = lcjax.encode({"w": np.arange(300, dtype=np.float32) + 1, "n": 4}, ref0)
    raw = bytearray(data.draw(st.sampled_from([message, delta])))
    if data.draw(st.booleans()):
        bit = data.draw(st.integers(0, len(raw) * 8 - 1))
        raw[bit // 8] ^= 1 << bit % 8
    else:
        raw = raw[: data.draw(st.integers(0, len(raw) - 1))]
    with pytest.raises(lcjax.LcjaxError):
        lcjax.decode(raw, ref0)


@pytest.mark.parametrize(
    "setting",
    [
        lambda: jax.enable_x64(True),
        lambda: jax.numpy_dtype_promotion("strict"),
        lambda: jax.debug_nans(True),
        lambda: jax.transfer_guard("disallow_explicit"),
        lambda: jax.default_matmul_precision("bfloat16"),
    ],
    ids=["x64", "strict", "debug_nans", "transfer_guard", "precision"],
)
def test_the_scripts_own_jax_settings_change_nothing(setting):
    rng = np.random.default_rng(9)
    state = train_state(rng)
    odd = jnp.asarray([np.nan, np.inf, 1.0, -0.0], jnp.float32)
    state = {**state, "params": {**state["params"], "odd": odd}}
    later = trained(state, rng)
    key, ref = lcjax.encode(state, preset="paper", bits=5)
    delta, new = lcjax.encode(later, ref)
    with setting():
        key_again, ref_again = lcjax.encode(state, preset="paper", bits=5)
        delta_again, _ = lcjax.encode(later, ref_again)
        read = lcjax.decode(delta_again, lcjax.decode(key_again))
    assert (key_again, delta_again) == (key, delta)
    assert leaves_equal(read.as_tree(state), new.as_tree(state))


def test_arrays_on_an_accelerator_give_the_same_bytes(monkeypatch):
    # Without an accelerator, CPU arrays take its way: copies and quantization on the device,
    # where only codes, tables and hashes come to the host.
    def run():
        rng = np.random.default_rng(10)
        state, messages, ref = train_state(rng), [], None
        for k in range(5):
            odd = np.array([0x7FC1, 0x7F81, 0x8000, 1, 0x3F80], np.uint16).view(jnp.bfloat16)
            state["params"]["odd"] = jnp.asarray(odd)
            if k == 3:
                state["params"]["new"] = jnp.linspace(0, 1, 50)
            message, ref = lcjax.encode(state, ref, preset="paper")
            messages.append(message)
            state = trained(state, rng)
        return messages

    on_host = run()
    monkeypatch.setattr("lcjax.capture._on_cpu", lambda array: False)
    assert run() == on_host
    read = None
    for message in on_host:
        read = lcjax.decode(message, read)
    assert read.tree["params"]["new"].shape == (50,)


@pytest.mark.parametrize("preset", ["paper", "lossless"])
def test_trees_of_a_reference_are_the_callers_own(preset):
    first = np.linspace(0, 1, 100, dtype=np.float32)
    key, ref = lcjax.encode({"w": first}, preset=preset)
    read = lcjax.decode(key)
    for tree in (ref.tree, ref.as_tree({"w": first}), read.tree):
        tree["w"][:] = 7
    delta, new = lcjax.encode({"w": first + np.float32(0.01)}, ref)
    assert leaves_equal(lcjax.decode(delta, read).tree, new.tree)


def test_key_data_that_make_no_key_are_damage():
    message, _ = lcjax.encode({"k": jax.random.key(0)}, preset="lossless")
    reader = container.from_bytes(message)
    for impl in ("nothing", "", "rbg"):
        reader.meta["leaves"][0]["impl"] = impl
        writer = container.Writer()
        for k in range(2):
            writer.add(bytes(reader.chunk(k)))
        ref = lcjax.decode(writer.finish(reader.meta).to_bytes())
        with pytest.raises(lcjax.CorruptDataError, match=f"not the data of a PRNG key of '{impl}'"):
            _ = ref.tree


def test_the_memory_limit_names_its_variable(monkeypatch):
    message, _ = lcjax.encode({"w": np.zeros(3)}, preset="lossless")
    monkeypatch.setenv("LCJAX_MAX_RESTORE_BYTES", "4GB")
    with pytest.raises(ValueError, match="LCJAX_MAX_RESTORE_BYTES must be a whole number.*'4GB'"):
        lcjax.decode(message)
