"""Annotations of weights and gradients whose state is sharded instead of copied: see sharding/letters.py."""

from collections.abc import Callable

import tensorflow as tf

from lingvo_moe.core.base_layer import VariableSpec
from lingvo_moe.core.nested_map import NestedMap, map_structure
from lingvo_moe.core.sharding import DimsMapping, current_mesh
from lingvo_moe.core.sharding.annotate import mesh_split
from lingvo_moe.core.tensors import custom_gradient


def in_use(weight: tf.Tensor, split: DimsMapping, gradient_split: DimsMapping) -> tf.Tensor:
    """A weight as a layer uses it, and its gradient as the state holds it.

    Args:
        split: the mesh axes of its dimensions where it is used: those of its letters.
        gradient_split: those of its gradient.
    """
    mesh = current_mesh()
    if mesh is None or mesh.size == 1:
        return weight

    @custom_gradient
    def used(w: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
        def grad(g: tf.Tensor) -> tf.Tensor:
            return mesh_split(g, mesh, gradient_split)

        return mesh_split(w, mesh, split), grad

    return used(weight)


def weights_in_use(theta: NestedMap, specs: NestedMap, gradient_specs: NestedMap) -> NestedMap:
    """The weights of a state as layers use them, but for those of stacks, which layers/repeat.py gathers.

    `gradient_specs` are those by which the gradients are sharded.
    """
    mesh = current_mesh()
    if mesh is None:
        return theta

    def used(weight: tf.Tensor, spec: VariableSpec, gradient: VariableSpec) -> tf.Tensor:
        return weight if spec.stack_dims else in_use(weight, spec.split, gradient.StoredSplit(mesh))

    return map_structure(used, theta, specs, gradient_specs)


def in_parts(tensor: tf.Tensor, spec: VariableSpec) -> tf.Tensor:
    """A weight or its gradient, sharded as a spec with `free_dims` says; as it is for one without."""
    mesh = current_mesh()
    if mesh is None or mesh.size == 1 or not spec.free_dims:
        return tensor
    return mesh_split(tensor, mesh, spec.StoredSplit(mesh))
