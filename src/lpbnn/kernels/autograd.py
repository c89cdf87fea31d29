"""Detection of a backward pass or a vmap under way, for which torch has no public API."""

import torch

_current_graph_task = getattr(torch._C, "_current_graph_task_id", None)


def backward_is_running() -> bool:
    """Return True while gradients are being computed in this thread.

    Without the private function that knows, the answer is always True. Then a layer that is called without
    its model, while the graph of the model's last pass is still alive, uses the factors of that pass.
    """
    return _current_graph_task is None or _current_graph_task() != -1


def vmap_is_running() -> bool:
    """Return True inside of ``torch.vmap`` and its relatives, where no tensor may be kept.

    Without the private function that knows, the answer is always False.
    """
    functorch = getattr(torch._C, "_functorch", None)
    level = getattr(functorch, "maybe_current_level", lambda: None)()
    return level is not None
