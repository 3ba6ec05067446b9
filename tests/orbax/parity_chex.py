"""What Orbax's test utilities need of chex, for where it is not installed: its dataclass."""

import dataclasses
import importlib.util
import sys
import types
from collections.abc import Mapping

import jax


def dataclass(cls):
    """A dataclass that is a pytree and a mapping of its fields."""

    def flatten(node):
        names = sorted(node)
        return [(jax.tree_util.GetAttrKey(name), node[name]) for name in names], tuple(names)

    def unflatten(names, values):
        node = object.__new__(made)
        node.__dict__.update(zip(names, values, strict=True))
        return node

    methods = {
        "__getitem__": lambda self, name: self.__dict__[name],
        "__iter__": lambda self: iter(self.__dict__),
        "__len__": lambda self: len(self.__dict__),
        "__module__": cls.__module__,
    }
    made = type(cls.__name__, (dataclasses.dataclass(cls), Mapping), methods)
    jax.tree_util.register_pytree_with_keys(made, flatten, unflatten)
    return made


def provide():
    """Makes ``import chex`` work."""
    if importlib.util.find_spec("chex") is None:
        module = types.ModuleType("chex")
        module.dataclass = dataclass
        sys.modules["chex"] = module
