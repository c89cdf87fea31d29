"""A network with converted layers as an ensemble: spread the batch, run once, gather the members."""

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from lpbnn.convert.convert import replace_modules
from lpbnn.convert.wrapper import Wrapper, remember
from lpbnn.likelihoods import check_batch, require_targets
from lpbnn.members.rows import (
    BatchMode,
    Places,
    batched,
    copied,
    gather,
    mask_places,
    masks_given,
    row_weights,
    rows_needed,
    spread,
    spread_tree,
)
from lpbnn.model import Model, Terms, as_call, batch_size, total, two_groups, walk
from lpbnn.rank_one.doors import check_stage, find_stages, raise_with, where_spread
from lpbnn.rank_one.factors import Factors
from lpbnn.rank_one.layer import Draw, FastWeight, draw_layers, take
from lpbnn.rank_one.norms import MemberNorm, is_batch_norm, sum_by_rows
from lpbnn.rank_one.stages import FULL, Cast, SpreadInTurn, fills_device

BatchNormMode = Literal["shared", "member"]
BATCH_NORM_MODES: tuple[str, ...] = get_args(BatchNormMode)


class Replaced(NamedTuple):
    """What stands in the place of the network's own layers and norms, in its order."""

    layers: list[FastWeight]
    norms: list[MemberNorm]


class FastWeightEnsemble(Model):
    """Any network that holds ``FastWeight`` layers, as J members (see ``lpbnn.convert``).

    Args:
        net: the converted network.
        batch_mode: in training, "split" gives every member a slice of the batch (the price of one
            network), "repeat" gives every member all of it (J times the compute).
        batch_norm: "shared" by the members (each sees the statistics of all), or one per "member".
        spread_at: path of the module where the batch becomes members, or several; "" is the whole network.
            None finds it: the smallest part that holds every converted layer, or those parts of it that
            it names. With an attribute ``in_turn = True`` they predict large batches member by member
            (``lpbnn.rank_one.stages``).
        fast_lr: learning rate of the fast weights, as a factor.
        repeat_last: share of the epochs, at the end (rounded up), that repeat the batch after all.
    """

    _looked = False  # whether layers have been asked for tables in the place of examples
    _masks: Places = ()  # here for models that an older version pickled

    def __init__(
        self,
        net: nn.Module,
        *,
        batch_mode: BatchMode = "split",
        batch_norm: BatchNormMode = "shared",
        spread_at: str | Sequence[str] | None = None,
        fast_lr: float = 1.0,
        repeat_last: float = 0.0,
        **model_options: Any,
    ) -> None:
        super().__init__(net, **model_options)
        self.batch_mode: BatchMode = batch_mode
        self.repeat_last = repeat_last
        self._late = False  # whether this is one of the last epochs
        self.fast_lr = fast_lr
        counts = {layer.factors.members for layer in self.layers}
        if len(counts) != 1:
            raise ValueError(
                f"the layers have {sorted(counts)} members; one ensemble has one number."
            )
        self.members = counts.pop()
        if spread_at is None:
            spread_at = find_stages(net)
        check_stage(net, spread_at)
        self.stages = [spread_at] if isinstance(spread_at, str) else list(spread_at)
        if batch_norm == "member":
            self._split_batch_norms()
        parts = [net.get_submodule(stage) for stage in self.stages if stage]
        self.shared_part = any(getattr(part, "in_turn", False) for part in parts)
        self.nothing_shared = not parts
        self._masks = mask_places(net)
        self._spread_at = SpreadInTurn()
        for stage in self.stages:
            sum_by_rows(net.get_submodule(stage))
            if stage:
                self._spread_at.add_to(net.get_submodule(stage))
        self._find()  # a compiler takes what it finds, the new batch norms of members too

    @property
    def layers(self) -> list[FastWeight]:
        """The converted layers, in the network's order."""
        return self._find().layers

    def _find(self) -> Replaced:
        """What is in the network now, which a user may have changed since the last call."""
        # A compiler would follow the walk through every module at every use, for seconds: it takes what
        # the last walk found.
        if not torch.compiler.is_compiling():
            self._wrappers = [m for m in walk(self.net, _may_hold) if isinstance(m, Wrapper)]
        found = [w for w in self._wrappers if w.in_place]
        layers = [w for w in found if isinstance(w, FastWeight)]
        if not layers:
            raise RuntimeError(
                "the network has no converted layer (any more). Build a model again."
            )
        return Replaced(layers, [w for w in found if isinstance(w, MemberNorm)])

    def look_again(self) -> None:
        self._find()

    def outputs(self, *args: Any, **kwargs: Any) -> Tensor:
        return gather(self.rows(args, kwargs, draw_layers(self.layers), "repeat"), self.members)

    def _split_batch_norms(self) -> None:
        """Give every member its own batch norm, wherever rows are spread."""
        made = {
            id(module): MemberNorm(module, self.members, path)
            for stage in self.stages
            for path, module in self.net.get_submodule(stage).named_modules(prefix=stage)
            if is_batch_norm(module)
        }
        replace_modules(self.net, made)

    def rows(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        draws: list[Draw],
        mode: BatchMode,
        first: int = 0,
        in_turn: bool = False,
        found: Replaced | None = None,
    ) -> Tensor:
        """Outputs of all rows, member-major, for the members in ``draws``, of which one is ``first``.

        Where a part of the network is shared by the members, they may go through the rest ``in_turn``.
        ``found`` is what the network holds, where that was asked for already.
        """
        batch = batch_size(args, kwargs)
        members = draws[0].members
        layers, norms = found or self._find()
        cast = Cast(layers, norms, self.members, draws, first)
        if "" in self.stages:
            masks = masks_given(self._masks, args, kwargs)
            args, kwargs = spread_tree((args, kwargs), batch, members, mode, masks)
        else:
            self._spread_at.plan = (batch, members, mode)
            # An input with as many rows by chance could be taken for the members' work in a turn.
            mistakable = in_turn and batched((args, kwargs), batch * members)
            self._spread_at.cast = cast if in_turn and not mistakable else None
        rows = rows_needed(batch, members, mode)
        cast.choose(draws, rows)
        # A compiler is asked first: it would compile anew for what it had looked at and has changed.
        look = not torch.compiler.is_compiling() and not self._looked and members > 1
        if look:
            cast.look_for(self.net)
        try:
            outputs = self.readout(self.net(*args, **kwargs))
        except (RuntimeError, ValueError) as error:
            raise_with(self._advice(error, batch), error)
        finally:
            self._spread_at.end()
            cast.release()
        if look:
            self._looked = True  # once is enough: a layer that gets a table gets it in every pass
        remember(outputs, layers, draws)
        if outputs.shape[0] != rows:
            raise RuntimeError(
                f"{batch} examples and {members} members make {rows} "
                f"rows, but the network returned {outputs.shape[0]}. {where_spread(self.stages)}"
            )
        return outputs

    def _advice(self, error: Exception, batch: int) -> str:
        if "more than 1 value per channel" in str(error) and self._find().norms:
            return (
                f"{self.members} members share a batch of {batch}, and each normalises its own part of "
                "it. Fix: larger batches (drop_last=True where only the last one is small), "
                "batch_mode='repeat', or batch_norm='shared'."
            )
        return "" if "" in self.stages else where_spread(self.stages)

    def passes(self, samples: int, width: int) -> Iterator[Any]:
        found = self._find()  # once: nobody changes the network between the passes of a prediction
        draws = draw_layers(found.layers, samples if self.stochastic else 1)
        count = draws[0].members
        for start in range(0, count, width):
            part = draws if width >= count else take(draws, start, width)
            yield partial(self._pass, found, part, start)

    def _pass(
        self, found: Replaced, draws: list[Draw], first: int, /, *args: Any, **kwargs: Any
    ) -> Tensor:
        members = draws[0].members
        if "" in self.stages and (members == 1 or self._better_in_turn(args, kwargs)):
            return self._in_turn(found, args, kwargs, draws, first)
        return gather(self.rows(args, kwargs, draws, "repeat", first, True, found), members)

    def _in_turn(
        self,
        found: Replaced,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        draws: list[Draw],
        first: int,
    ) -> Tensor:
        """Each member through the whole network by itself, with inputs of its own."""
        batch, masks = batch_size(args, kwargs), masks_given(self._masks, args, kwargs)
        outputs = []
        for i in range(draws[0].members):
            own_args, own_kwargs = copied((args, kwargs), batch, masks=masks)
            one = take(draws, i, 1)
            outputs.append(self.rows(own_args, own_kwargs, one, "repeat", first + i, found=found))
        return torch.stack(outputs)

    def _better_in_turn(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a batch fills the device by itself: then each member is a plain network with its weights.

        Where a part of the network is shared by the members, it is asked behind that part.
        """
        return fills_device(batched((args, kwargs), batch_size(args, kwargs)), FULL)

    def loss(self, x: Any, y: Tensor) -> Terms:
        shared = self.shared()
        nll = self.batch_nll(x, y, shared)
        # Of layers on several devices the penalties are on the first one's, the outputs on the last one's.
        added = {name: term.to(nll.device) for name, term in self.penalties(shared).items()}
        return total(nll=nll, **added)

    def batch_nll(self, x: Any, y: Tensor, shared: Any = None) -> Tensor:
        """Mean NLL of the members' rows; every example counts once."""
        args, kwargs = as_call(x)
        batch = batch_size(args, kwargs)
        check_batch(x, y, self.task)
        require_targets(y, batch)
        mode: BatchMode = "repeat" if self._late or not self.training else self.batch_mode
        draws = self.draw(rows_needed(batch, self.members, mode), shared)
        outputs = self.rows(args, kwargs, draws, mode)
        weights = row_weights(batch, self.members, mode, outputs.device)
        return self.nll(outputs, spread(y, self.members, mode), weights)

    def before_epoch(self, epoch: int, epochs: int) -> None:
        self._late = epoch >= epochs - math.ceil(self.repeat_last * epochs)

    def phase(self) -> object:
        return self._late

    def shared(self) -> Any:
        """What the draw and the penalties of one loss are both computed from."""
        return None

    def draw(self, rows: int, shared: Any = None) -> list[Draw]:
        """The factors of every layer for a training pass of so many rows."""
        return draw_layers(self.layers)

    def penalties(self, shared: Any = None) -> Terms:
        """What the method adds to the NLL, weighted, by name."""
        return {}

    def parameter_groups(
        self, weight_decay: float = 0.0, lr: float | None = None
    ) -> list[dict[str, Any]]:
        fast = [p for layer in self.layers for p in layer.factors.parameters()]
        fast += [layer.member_bias for layer in self.layers if layer.member_bias is not None]
        known = {id(parameter) for parameter in fast}
        slow = [parameter for parameter in self.parameters() if id(parameter) not in known]
        return two_groups(slow, fast, weight_decay, lr, self.fast_lr)


def _may_hold(module: nn.Module) -> bool:
    # Most modules are theirs, and no layer of the network is.
    return not isinstance(module, Factors)
