"""Recurrent layers with matrices that are layers.

``nn.RNN``, ``nn.LSTM`` and ``nn.GRU`` hold their weight matrices as bare parameters and hand them to one
kernel, so a conversion leaves them as they are. ``split_recurrent`` rewrites them with an ``nn.Linear`` for
each matrix, which is called (that of the state at every time step) and can be converted like any other.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from lpbnn.convert.attention import linear_of
from lpbnn.convert.wrapper import move_hooks

State = tuple[Tensor, ...]  # h, and c of an LSTM: (rows, ...) each
KINDS = (nn.RNN, nn.LSTM, nn.GRU)
MATRICES = ("ih", "hh", "hr")  # of the input, of the state, of an LSTM's projection


class SplitRecurrent(nn.Module):
    """``nn.RNN``, ``nn.LSTM`` or ``nn.GRU`` with its matrices as layers: ih_l0, hh_l0, ih_l0_reverse, ...

    Same call, same answer to rounding, same weights bit for bit. It runs step by step in Python, slower
    than torch's kernel (docs/howto/own-loop.md).

    Example:
        >>> lstm = nn.LSTM(4, 8, num_layers=2, batch_first=True)
        >>> x = torch.randn(3, 5, 4)
        >>> torch.allclose(SplitRecurrent(lstm)(x)[0], lstm(x)[0], atol=1e-6)
        True
    """

    def __init__(self, rnn: nn.RNNBase) -> None:
        super().__init__()
        if type(rnn) not in KINDS:
            raise TypeError(
                f"expected an nn.RNN, nn.LSTM or nn.GRU; got {type(rnn).__name__}, which may compute otherwise."
            )
        self.kind, self.mode = type(rnn), rnn.mode
        self.input_size, self.hidden_size = rnn.input_size, rnn.hidden_size
        self.proj_size, self.num_layers = rnn.proj_size, rnn.num_layers
        self.bias, self.batch_first, self.dropout = rnn.bias, rnn.batch_first, rnn.dropout
        self.bidirectional = rnn.bidirectional
        self.suffixes = [
            f"_l{layer}{side}"
            for layer in range(rnn.num_layers)
            for side in (("", "_reverse") if rnn.bidirectional else ("",))
        ]
        for suffix in self.suffixes:
            for name in MATRICES:
                weight = getattr(rnn, f"weight_{name}{suffix}", None)
                if weight is not None:
                    bias = getattr(rnn, f"bias_{name}{suffix}", None)
                    setattr(self, name + suffix, linear_of(weight, bias))
        self.train(rnn.training)
        move_hooks(rnn, self)

    def restore(self) -> nn.RNNBase:
        """Return torch's layer, with the matrices as they are now."""
        options: dict[str, Any] = {"proj_size": self.proj_size} if self.proj_size else {}
        if self.kind is nn.RNN:
            options["nonlinearity"] = self.mode.removeprefix("RNN_").lower()
        first = getattr(self, f"ih{self.suffixes[0]}").weight
        kind: Any = self.kind
        rnn = kind(
            self.input_size,
            self.hidden_size,
            self.num_layers,
            bias=self.bias,
            batch_first=self.batch_first,
            dropout=self.dropout,
            bidirectional=self.bidirectional,
            device=first.device,
            dtype=first.dtype,
            **options,
        )
        with torch.no_grad():
            for name, parameter in rnn.named_parameters():
                part, _, path = name.partition("_")  # weight_ih_l0: the weight of ih_l0
                own = getattr(getattr(self, path), part)
                parameter.copy_(own).requires_grad_(own.requires_grad)
        move_hooks(self, rnn)
        return rnn.train(self.training)

    def flatten_parameters(self) -> None:
        """Do nothing: there is no kernel whose memory would be arranged."""

    def extra_repr(self) -> str:
        return f"{self.kind.__name__}, {self.input_size}, {self.hidden_size}"

    def forward(
        self, input: Tensor | PackedSequence, hx: Any = None
    ) -> tuple[Tensor | PackedSequence, Any]:
        """Return the outputs and the last states, in torch's layout."""
        if isinstance(input, PackedSequence):
            padded, lengths = pad_packed_sequence(input, batch_first=True)
            lengths = lengths.to(padded.device)
        else:
            padded, lengths = input, None
        one = padded.dim() == 2  # one sequence, without a batch
        if one:
            padded = padded.unsqueeze(0)
        elif lengths is None and not self.batch_first:
            padded = padded.transpose(0, 1)
        rows = padded.shape[0]  # not len(), at which torch.export fixes the size of the batch
        starts = self._starts(hx, rows, one)
        ends: list[State] = []
        sides = 2 if self.bidirectional else 1
        for first in range(0, len(self.suffixes), sides):
            outputs = []
            for i in range(first, first + sides):
                start = None if starts is None else tuple(part[i] for part in starts)
                output, end = self._run(self.suffixes[i], padded, start, lengths)
                outputs.append(output)
                ends.append(end)
            padded = torch.cat(outputs, -1)
            if first + sides < len(self.suffixes):
                padded = F.dropout(padded, self.dropout, self.training)
        states = [torch.stack(parts) for parts in zip(*ends, strict=True)]
        if one:
            padded, states = padded.squeeze(0), [state.squeeze(1) for state in states]
        last = tuple(states) if self.mode == "LSTM" else states[0]
        if isinstance(input, PackedSequence) and lengths is not None:
            return _pack(padded, lengths.cpu(), input), last
        return (padded if self.batch_first or one else padded.transpose(0, 1)), last

    def _starts(self, hx: Any, batch: int, one: bool) -> State | None:
        """Return the given initial states, (layers, batch, ...) each."""
        if hx is None:
            return None
        given: State = tuple(hx) if self.mode == "LSTM" else (hx,)
        if one:
            given = tuple(part.unsqueeze(1) for part in given)
        widths = (self.proj_size or self.hidden_size, self.hidden_size)
        for part, width in zip(given, widths, strict=False):
            expected = (len(self.suffixes), batch, width)
            if part.shape != expected:
                raise RuntimeError(
                    f"expected an initial state of shape {expected}, got {tuple(part.shape)}."
                )
        return given

    def _run(
        self, suffix: str, x: Tensor, start: State | None, lengths: Tensor | None
    ) -> tuple[Tensor, State]:
        """Run one direction of one layer over (rows, time, inputs)."""
        matrices: list[Callable[[Tensor], Tensor] | None] = [
            getattr(self, name + suffix, None) for name in MATRICES
        ]
        ih, hh, hr = matrices
        assert ih is not None
        assert hh is not None
        inputs = ih(x)  # of all steps at once; from here on the batch may be expanded to members
        rows, steps = inputs.shape[:2]
        if start is None:
            sizes = (self.proj_size or self.hidden_size, self.hidden_size)
            count = 2 if self.mode == "LSTM" else 1
            state = tuple(inputs.new_zeros(rows, size) for size in sizes[:count])
        else:
            state = tuple(_rows(part, rows) for part in start)
        ends_at = None if lengths is None else _rows(lengths, rows)
        outputs: dict[int, Tensor] = {}
        order = range(steps)
        for t in reversed(order) if suffix.endswith("_reverse") else order:
            new = self._step(inputs[:, t], hh(state[0]), state, hr)
            if ends_at is None:
                state, outputs[t] = new, new[0]
            else:  # a sequence that has ended, or not begun from the right, keeps its state
                runs = (t < ends_at).unsqueeze(1)
                pairs = zip(new, state, strict=True)
                state = tuple(torch.where(runs, after, before) for after, before in pairs)
                outputs[t] = torch.where(runs, new[0], 0.0)
        return torch.stack([outputs[t] for t in order], 1), state

    def _step(
        self, inputs: Tensor, recurrent: Tensor, state: State, hr: Callable[[Tensor], Tensor] | None
    ) -> State:
        """Return the state after one step."""
        if self.mode == "LSTM":
            i, f, g, o = (inputs + recurrent).chunk(4, -1)
            c = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
            return (h if hr is None else hr(h)), c
        if self.mode == "GRU":
            (r_in, z_in, n_in), (r_own, z_own, n_own) = inputs.chunk(3, -1), recurrent.chunk(3, -1)
            z = (z_in + z_own).sigmoid()
            n = (n_in + (r_in + r_own).sigmoid() * n_own).tanh()
            return ((1 - z) * n + z * state[0],)
        total = inputs + recurrent
        return (total.tanh() if self.mode == "RNN_TANH" else total.relu(),)


def split_recurrent(net: nn.Module) -> nn.Module:
    """Make the matrices of every RNN, LSTM and GRU layers that ``lpbnn.build`` converts, in place.

    ``lpbnn.undo`` makes them torch's again. It is not done by default: the layers then run step by step in
    Python, slower than torch's kernel.

    Args:
        net: a network with ``nn.RNN``, ``nn.LSTM`` or ``nn.GRU``.

    Returns:
        The network; the new layer, if ``net`` itself is one of these.

    Raises:
        ValueError: the network has none.

    Example:
        >>> import lpbnn
        >>> net = nn.ModuleDict({"rnn": nn.GRU(4, 8, batch_first=True), "head": nn.Linear(8, 2)})
        >>> [
        ...     path
        ...     for path, layer in split_recurrent(net).named_modules()
        ...     if type(layer) is nn.Linear
        ... ]
        ['rnn.ih_l0', 'rnn.hh_l0', 'head']
    """
    from lpbnn.convert.convert import replace_modules  # which imports this module

    made = {
        id(module): SplitRecurrent(module)
        for module in net.modules()
        if isinstance(module, nn.RNNBase) and type(module) in KINDS
    }
    if not made:
        kinds = ", ".join(kind.__name__ for kind in KINDS)
        raise ValueError(f"{type(net).__name__} has no recurrent layer to split ({kinds}).")
    if id(net) in made:
        return made[id(net)]
    replace_modules(net, made)
    return net


def _pack(padded: Tensor, lengths: Tensor, given: PackedSequence) -> PackedSequence:
    """Pack outputs in the order of the given sequences, which code may rely on; of members by length."""
    rows, order = len(padded), given.sorted_indices
    if rows != len(lengths):
        lengths = _rows(lengths, rows)
        return pack_padded_sequence(padded, lengths, batch_first=True, enforce_sorted=False)
    if order is None:
        return pack_padded_sequence(padded, lengths, batch_first=True)
    packed = pack_padded_sequence(padded[order], lengths[order.cpu()], batch_first=True)
    return PackedSequence(packed.data, packed.batch_sizes, order, given.unsorted_indices)


def _rows(x: Tensor, rows: int) -> Tensor:
    """Return x (batch, ...) for rows that a batch was expanded to, member-major."""
    return x if len(x) == rows else x[torch.arange(rows, device=x.device) % len(x)]
