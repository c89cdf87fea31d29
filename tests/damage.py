"""Damage to files, from a seeded generator."""

import random


def damaged(content: bytes, draw: random.Random) -> bytes:
    """Change some bytes, cut the end, drop or repeat a part."""
    data, kind = bytearray(content), draw.randrange(5)
    if kind == 0:
        for _ in range(draw.choice((1, 1, 8, 64))):
            data[draw.randrange(len(data))] = draw.randrange(256)
    elif kind == 1:
        del data[draw.randrange(len(data)) :]
    elif kind == 2:
        start = draw.randrange(len(data))
        del data[start : start + draw.randrange(1, 64)]
    elif kind == 3:
        start = draw.randrange(len(data))
        data[start:start] = data[start : start + draw.randrange(1, 256)]
    else:
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    return bytes(data)
