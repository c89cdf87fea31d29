"""Detection of a backward pass, a vmap or a tracer under way."""

from typing import Any

import torch
from torch.utils._pytree import tree_leaves

_current_graph_task = getattr(torch._C, "_current_graph_task_id", None)
_saved_tensor_hooks = getattr(
    getattr(torch._C, "_autograd", None), "_top_saved_tensors_default_hooks", None
)


def backward_is_running() -> bool:
    """Return True while gradients are being computed in this thread.

    Without the private function that knows, the answer is always True. Then a layer that is called without
    its model, while the graph of the model's last pass is still alive, uses the factors of that pass.
    """
    return _current_graph_task is None or _current_graph_task() != -1


def backward_is_nested() -> bool:
    """Return True for code in a backward pass that will be differentiated by a backward pass of its own.

    That is reentrant checkpointing; the other kind computes again under hooks on what is saved. Without the
    private function that knows, the answer is always False.
    """
    if _saved_tensor_hooks is None or not torch.is_grad_enabled():
        return False
    return _saved_tensor_hooks(True) is None


def is_traced(tree: Any) -> bool:
    """Return True in a compiler or tracer, or for tensors without values: on the meta device, or fake."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing():  # type: ignore[attr-defined]
        return True
    leaves = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
    return any(x.is_meta or getattr(x, "fake_mode", None) is not None for x in leaves)


def vmap_is_running() -> bool:
    """Return True inside of ``torch.vmap`` and its relatives, where no tensor may be kept.

    Without the private function that knows, the answer is always False.
    """
    functorch = getattr(torch._C, "_functorch", None)
    level = getattr(functorch, "maybe_current_level", lambda: None)()
    return level is not None
