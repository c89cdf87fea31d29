"""Wrong folders of pictures and wrong options, told with a fix before anything is trained."""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from folders import SIZE, classes, load, picture
from PIL import Image

from lpbnn import data


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    """Two classes without parts."""
    return classes(tmp_path / "pets", "cat", "dog")


def cut_short(root: Path) -> Path:
    path = root / "dog" / "03.png"
    path.write_bytes(path.read_bytes()[:120])
    return root


def deep(root: Path) -> Path:
    Image.fromarray(np.zeros(SIZE[::-1], dtype=np.uint16)).save(root / "dog" / "03.png")
    return root


def parts(root: Path, **names: str) -> Path:
    """The classes of every part, in a new folder."""
    for part, found in names.items():
        classes(root / "parts" / part, *found.split(), each=3)
    return root / "parts"


def emptied(root: Path, *left: str, name: str = "owl") -> Path:
    (root / name).mkdir()
    for file in left:
        (root / name / file).write_text("")
    return root


def around(root: Path) -> Path:
    return parts(root / "outer", train="cat dog").parent


def with_pictures_of(root: Path, name: str) -> Path:
    picture(root / name)
    return root


def alone(root: Path) -> Path:
    shutil.rmtree(root / "dog")
    return root


def flat(root: Path) -> Path:
    return root / "cat"


WRONG: dict[str, tuple[Callable[[Path], Path], str]] = {
    "nowhere": (lambda root: root / "nowhere", r"nowhere does not exist. Fix: give as root"),
    "file": (lambda root: root / "cat" / "00.png", r"00.png is a file. Fix: give as root"),
    "flat": (
        flat,
        r"cat holds 10 pictures and no folders; .* Fix: move the pictures into such folders",
    ),
    "parent": (
        lambda root: root.parent,
        r"pets holds the folders cat, dog; .*--data-root \S*pets\)",
    ),
    "parent of parts": (
        around,
        r"is the folder around the data: \S*parts has .*--data-root \S*parts\)",
    ),
    "a part": (
        lambda root: parts(root, train="cat dog", test="cat dog") / "train",
        r"train is one part of the data in \S*parts. Fix: .*--data-root \S*parts\)",
    ),
    "one class": (alone, r"holds one class only, cat; expected two or more. Fix"),
    "empty class": (
        emptied,
        r"owl holds no pictures \(.png, .*\). Fix: put the pictures of the class 'owl'",
    ),
    "no pictures": (
        lambda root: emptied(root, "a.txt"),
        r"owl holds no pictures .*; it holds a.txt. Fix",
    ),
    "missing class": (
        lambda root: parts(root, train="cat dog owl", test="cat dog"),
        r"test lacks owl, unlike \S*train; expected the same classes in every part. Fix",
    ),
    "extra class": (
        lambda root: parts(root, train="cat dog", val="cat dog emu"),
        r"val also has emu, unlike \S*train; .* belong in \S*ood",
    ),
    "no train": (
        lambda root: parts(root, test="cat dog"),
        r"has test and no train. Fix: add \S*train",
    ),
    "another name": (
        lambda root: parts(root, train="cat dog", valid="cat dog"),
        r"has a folder valid; .* Fix: rename it to val",
    ),
    "deeper": (
        lambda root: with_pictures_of(root, "cat/young/00.png"),
        r"cat holds the folders young; .* move the pictures up",
    ),
    "empty ood": (
        lambda root: emptied(root, "a.txt", name="ood"),
        r"ood holds no pictures .* or remove",
    ),
    "cut short": (
        cut_short,
        r"dog/03.png cannot be read: damaged, or no image .*Fix: get the file again",
    ),
    "16 bits": (deep, r"dog/03.png has pixels of more than 8 bits .* Fix: save it with 8 bits"),
    "too few": (
        lambda root: with_pictures_of(root, "owl/0.png"),
        r"'owl' has 1 pictures to train with, of which 1 for val, 1 for test .* Fix: add pictures",
    ),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("memory", [4, 0])
def test_a_wrong_folder_is_told_with_its_fix(plain: Path, name: str, memory: int) -> None:
    make, expected = WRONG[name]
    with pytest.raises((ValueError, FileNotFoundError), match=f"(?s){expected}"):
        load(make(plain), memory=memory)


def test_no_root_is_told_with_its_fix() -> None:
    with pytest.raises(ValueError, match="no root was given. Fix: give as root .--data-root"):
        data.load("folder")


def test_two_sizes_are_named_with_the_option(plain: Path) -> None:
    other = picture(plain / "dog" / "other.png", (9, 9))
    said = rf"cat/00.png is 10x8, {other} is 9x9; .* Fix: give it.*--data.size 64"
    with pytest.raises(ValueError, match=said):
        load(plain)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"size": 0}, r"size=0; expected a side in pixels or \(height, width\)"),
        ({"size": [3, 4, 5]}, r"size=\[3, 4, 5\]; expected"),
        ({"size": "big"}, r"size='big'; expected"),
        ({"channels": 4}, r"channels=4; expected 1 \(grey\) or 3"),
        ({"test": 0}, r"test=0; expected a share of train, 0 < test < 1"),
        ({"val": 1.5}, r"val=1.5; expected a share of train, 0 <= val < 1"),
        ({"val": 0.5, "test": 0.5}, r"none is left. Fix"),
        ({"colour": 1}, r"'folder' was given option 'colour'; its options are size, channels, val"),
    ],
)
def test_a_wrong_option_is_told(plain: Path, options: dict[str, object], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        load(plain, **options)


def test_a_share_of_a_part_that_is_there_is_refused(plain: Path) -> None:
    root = parts(plain, train="cat dog", val="cat dog")
    with pytest.raises(ValueError, match=r"val=0.2 asks for a share of train, but \S*val is there"):
        load(root, val=0.2)
