"""Where images come from: a folder of files, or scikit-learn's digits. A source reads an image by its number."""

import abc
import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from lingvo_moe.core.permutation import permute
from lingvo_moe.core.suggest import did_you_mean
from lingvo_moe.tasks.image.input.errors import ImageDataError

SUFFIXES = (".jpeg", ".jpg", ".png")
HELD_OUT_SPLITS = ("validation", "val", "test")
_DIGITS_HELD_OUT = 360  # of 1,797
_LAYOUT = "<split>/<class>/<name>.jpg (or .jpeg, .png), with the split 'train'"


class Split(abc.ABC):
    """Images with labels. The labels are numbers of classes.

    Attributes:
        labels: int32 [n].
    """

    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.labels)

    @abc.abstractmethod
    def Read(self, i: int, channels: int) -> np.ndarray:
        """Image i: uint8 [rows, columns, channels], 3 channels for colours or 1 for shades of grey.

        Raises:
            ImageDataError: it cannot be read.
        """

    @abc.abstractmethod
    def Key(self) -> str:
        """A digest of the names, labels and order of the images."""


class FolderSplit(Split):
    """The image files of one split of a folder."""

    def __init__(self, paths: Sequence[Path], labels: Sequence[int], root: Path):
        self._paths, self._root = paths, root
        self.labels = np.array(labels, np.int32)

    def Read(self, i: int, channels: int) -> np.ndarray:
        """See Split."""
        from PIL import Image

        path = self._paths[i]
        try:
            with Image.open(path) as image:
                pixels = np.asarray(image.convert("RGB" if channels == 3 else "L"))
        # What Pillow raises for damaged files is of many kinds.
        except Exception as e:
            raise ImageDataError(
                f"{path}: cannot be read as an image ({e or type(e).__name__}); replace it or remove it"
            ) from e
        return pixels.reshape(*pixels.shape[:2], channels)

    def Key(self) -> str:
        """See Split."""
        digest = hashlib.blake2b(digest_size=16)
        for path in self._paths:
            digest.update(f"{path.relative_to(self._root).as_posix()}\0".encode())
        return digest.hexdigest()


class DigitsSplit(Split):
    """Some of scikit-learn's handwritten digits: 8 x 8 pixels, 10 classes."""

    def __init__(self, images: np.ndarray, labels: np.ndarray):
        self._images, self.labels = images, labels.astype(np.int32)

    def Read(self, i: int, channels: int) -> np.ndarray:
        """See Split."""
        return np.repeat(self._images[i][..., np.newaxis], channels, axis=-1)

    def Key(self) -> str:
        """See Split."""
        data = self._images.tobytes() + self.labels.tobytes()
        return hashlib.blake2b(data, digest_size=16).hexdigest()


def folder_splits(
    data_dir: str, train: str, held_out: str
) -> tuple[list[str], FolderSplit, FolderSplit | None]:
    """The images of a folder in the layout of TensorFlow Datasets' ImageFolder.

    Args:
        data_dir: a directory of <split>/<class>/<name>, where the name ends in one of SUFFIXES.
        train: the split to train on.
        held_out: the split to evaluate on; '' for the first of HELD_OUT_SPLITS that is there, if any.

    Returns:
        The classes, sorted: those of both splits. The training images, and the held-out ones or None.

    Raises:
        ImageDataError: a directory or a split that is missing or empty, naming it.
    """
    root = Path(data_dir)
    if not root.is_dir():
        raise ImageDataError(f"{data_dir}: no such directory; expected {_LAYOUT}")
    there = sorted(path.name for path in root.iterdir() if path.is_dir())
    for name in filter(None, (train, held_out)):
        if name not in there:
            hint = did_you_mean(name, there)
            raise ImageDataError(f"{data_dir}: has no directory {name!r}{hint}; expected {_LAYOUT}")
    held_out = held_out or next((name for name in HELD_OUT_SPLITS if name in there), "")
    found = {name: _by_class(root / name) for name in filter(None, (train, held_out))}
    classes = sorted({label for each in found.values() for label in each})
    splits = {name: _split(each, classes, root) for name, each in found.items()}
    return classes, splits[train], splits.get(held_out)


def _by_class(directory: Path) -> dict[str, list[Path]]:
    """The image files of a split by class, sorted."""
    found = {}
    for folder in sorted(path for path in directory.iterdir() if path.is_dir()):
        files = sorted(p for p in folder.iterdir() if p.name.lower().endswith(SUFFIXES))
        if files:
            found[folder.name] = files
    if not found:
        raise ImageDataError(f"{directory}: holds no images; expected {_LAYOUT}")
    return found


def _split(by_class: dict[str, list[Path]], classes: list[str], root: Path) -> FolderSplit:
    numbers = {name: i for i, name in enumerate(classes)}
    pairs = [(path, numbers[name]) for name, files in by_class.items() for path in files]
    return FolderSplit([path for path, _ in pairs], [label for _, label in pairs], root)


def digits_splits() -> tuple[list[str], DigitsSplit, DigitsSplit]:
    """scikit-learn's 1,797 handwritten digits: the classes, 1,437 images to train on and 360 held out.

    Which are held out is fixed: the first of one shuffled order.
    """
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = np.round(digits.images * (255 / 16)).astype(np.uint8)
    order = permute(np.arange(len(images)), len(images), "digits")
    held_out, train = order[:_DIGITS_HELD_OUT], order[_DIGITS_HELD_OUT:]
    classes = [str(name) for name in digits.target_names]
    return (
        classes,
        DigitsSplit(images[train], digits.target[train]),
        DigitsSplit(images[held_out], digits.target[held_out]),
    )
