"""Parts of several networks: initialisation, convolutions, dropout."""

from torch import Tensor, nn


def initialise(net: nn.Module) -> None:
    """He's normal initialisation by fan-out for convolutions, as ResNet and Wide ResNet published.

    Batch norm starts as the identity (torch's default) and the head's bias at zero; the head's
    weight keeps torch's default, as in both papers' code.

    >>> conv = nn.Conv2d(4, 8, 3, bias=False)
    >>> initialise(conv)
    >>> round(float(conv.weight.detach().std()), 1)  # sqrt(2 / (8 * 9)) = 0.17
    0.2
    """
    for module in net.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        elif isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)


def conv(
    inputs: int, outputs: int, kernel: int, stride: int = 1, dilation: int = 1, groups: int = 1
) -> nn.Conv2d:
    """A convolution that keeps the size (stride 1). No bias: a norm follows.

    >>> conv(3, 16, 3)
    Conv2d(3, 16, kernel_size=(3, 3), stride=(1, 1), padding=(1, 1), bias=False)
    """
    padding = kernel // 2 * dilation
    return nn.Conv2d(inputs, outputs, kernel, stride, padding, dilation, groups, bias=False)


def dropout(rate: float) -> nn.Module:
    """The dropout slot: a layer only where there is something to drop.

    >>> dropout(0.0), dropout(0.1)
    (Identity(), Dropout(p=0.1, inplace=False))
    """
    if not 0.0 <= rate < 1.0:
        raise ValueError(f"dropout is {rate!r}; expected a rate with 0 <= rate < 1")
    return nn.Dropout(rate) if rate > 0 else nn.Identity()


def global_average(x: Tensor) -> Tensor:
    """The mean over all positions, any spatial size: (batch, channels).

    >>> import torch
    >>> global_average(torch.ones(2, 5, 4, 3)).shape
    torch.Size([2, 5])
    """
    # Not adaptive_avg_pool2d: its backward on CUDA is refused under deterministic algorithms.
    return x.mean((2, 3))
