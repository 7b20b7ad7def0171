"""Custom gradients whose operations have names like those of TensorFlow's own gradients."""

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf


def custom_gradient(fn: Callable[..., tuple[Any, Callable]]) -> Callable[..., Any]:
    """`tf.custom_gradient`, its gradient in the scope gradient_tape/<that of the call>.

    Without such a name, plans would attribute the gradient's work to another part of the model (core/hlo/parts.py).
    """

    @functools.wraps(fn)
    def named(*args: Any) -> tuple[Any, Callable]:
        scope = tf.get_current_name_scope()
        results, grad = fn(*args)

        def named_grad(*upstream: Any) -> Any:
            with tf.name_scope(f"gradient_tape/{scope}/"):
                return grad(*upstream)

        return results, named_grad

    return tf.custom_gradient(named)
