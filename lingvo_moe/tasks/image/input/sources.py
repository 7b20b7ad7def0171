"""Sources of images: a folder of files, or scikit-learn's digits. A source reads an image by its number."""

import abc
import hashlib
import logging
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lingvo_moe.core.config.checks import did_you_mean
from lingvo_moe.core.input.input_errors import OtherDataError
from lingvo_moe.core.input.permutation import permute

if TYPE_CHECKING:  # it takes a while to import
    from PIL import Image as PillowImage

SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")
HELD_OUT_SPLITS = ("validation", "val", "test")
_DIGITS_HELD_OUT = 360  # of 1,797
_LAYOUT = f"<split>/<class>/<name> with {', '.join(SUFFIXES)}, and the split 'train'"
_BITS_PER_SAMPLE = 258  # TIFF's tag
_log = logging.getLogger(__name__)


class ImageDataError(ValueError):
    """Images cannot be used. The message names the file or directory, what is wrong, and what would be right."""


class OtherImagesError(ImageDataError, OtherDataError):
    """The images are not those that a run began with."""


class Split(abc.ABC):
    """Images with labels. The labels are numbers of classes."""

    labels: np.ndarray  # int32 [n]

    def __len__(self) -> int:
        return len(self.labels)

    @abc.abstractmethod
    def Read(self, i: int, channels: int) -> np.ndarray:
        """Image i: uint8 [rows, columns, channels], 3 channels for colours or 1 for shades of grey.

        Raises ImageDataError: it cannot be read.
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
        from PIL import Image

        path = self._paths[i]
        try:
            with Image.open(path) as image:
                pixels = np.asarray(_in_8_bits(image).convert("RGB" if channels == 3 else "L"))
        # What Pillow raises for damaged files is of many kinds.
        except Exception as e:
            raise ImageDataError(
                f"{path}: cannot be read as an image ({str(e) or type(e).__name__}); replace it or remove it"
            ) from e
        return pixels.reshape(*pixels.shape[:2], channels)

    def Key(self) -> str:
        digest = hashlib.blake2b(digest_size=16)
        for path in self._paths:
            digest.update(f"{path.relative_to(self._root).as_posix()}\0".encode())
        return digest.hexdigest()


class DigitsSplit(Split):
    """Some of scikit-learn's handwritten digits: 8 x 8 pixels, 10 classes."""

    def __init__(self, images: np.ndarray, labels: np.ndarray):
        self._images, self.labels = images, labels.astype(np.int32)

    def Read(self, i: int, channels: int) -> np.ndarray:
        return np.repeat(self._images[i][..., np.newaxis], channels, axis=-1)

    def Key(self) -> str:
        data = self._images.tobytes() + self.labels.tobytes()
        return hashlib.blake2b(data, digest_size=16).hexdigest()


def _in_8_bits(image: "PillowImage.Image") -> "PillowImage.Image":
    """An image whose shades, where they have more bits than 8, are scaled by the range that black to white has.

    That is 0 to 65535 for 16 bits, of which the high byte is kept, as Pillow does for colours; and 0 to 1 for floats.

    Raises:
        ValueError: integers of 32 bits or with a sign, whose white is not known; or floats outside of 0 to 1.
    """
    from PIL import Image

    if image.mode.startswith("I;16"):
        bits = getattr(image, "tag_v2", {}).get(_BITS_PER_SAMPLE, (16,))[0]  # TIFFs may have 12
        return Image.fromarray((np.asarray(image) >> (bits - 8)).astype(np.uint8))
    if image.mode == "I":
        raise ValueError(
            "mode I, integers of 32 bits or with a sign: which of them is white is not known; scale them to 8 bits, or"
            " to 16 without a sign"
        )
    if image.mode == "F":
        shades = np.asarray(image)
        if not (shades.min() >= 0 and shades.max() <= 1):  # nor NaN
            raise ValueError(
                f"mode F, floats from {shades.min():g} to {shades.max():g}: black must be 0 and white 1; scale them"
            )
        return Image.fromarray(np.round(shades * 255).astype(np.uint8))
    return image


def folder_splits(
    data_dir: str, train: str, held_out: str, began: Collection[str] = ()
) -> tuple[list[str], FolderSplit, FolderSplit | None]:
    """The images of a folder in the layout of TensorFlow Datasets' ImageFolder.

    Args:
        data_dir: a directory of <split>/<class>/<name>, where the name ends in one of SUFFIXES.
        held_out: the split to evaluate on; '' for the first of HELD_OUT_SPLITS that is there, if any.
        began: the classes of a run that goes on. Names that begin with a dot are no classes, unless they are there.

    Returns:
        The classes, sorted: those of both splits. The training images, and the held-out ones or None.

    Raises:
        ImageDataError: a split or a class that is missing or has no image, or a name that is not UTF-8; it is named.
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
    by_split = {name: _by_class(root / name, began) for name in filter(None, (train, held_out))}
    classes = sorted({label for by_class in by_split.values() for label in by_class})
    splits = {name: _split(by_class, classes, root) for name, by_class in by_split.items()}
    return classes, splits[train], splits.get(held_out)


def _by_class(directory: Path, began: Collection[str]) -> dict[str, list[Path]]:
    """The image files of a split by class, sorted. Logs how many other files there are."""
    images, others = dict[str, list[Path]](), list[Path]()
    for folder in _listed(directory, began):
        if not folder.is_dir():
            continue
        paths = _listed(folder)
        files = [path for path in paths if path.name.lower().endswith(SUFFIXES)]
        if not files:
            raise ImageDataError(
                f"{folder}: a class without images: it holds {_some(paths)}; remove it, or put images there:"
                f" expected {_LAYOUT}"
            )
        images[folder.name] = files
        others += [path for path in paths if not path.name.lower().endswith(SUFFIXES)]
    if not images:
        raise ImageDataError(f"{directory}: holds no images; expected {_LAYOUT}")
    if others:
        _log.warning(
            "%s: %d files or directories beside the images are not read, e.g. %s",
            directory,
            len(others),
            others[0].relative_to(directory),
        )
    return images


def _listed(directory: Path, hidden: Collection[str] = ()) -> list[Path]:
    """Lists a directory, sorted, without names that begin with a dot except those in `hidden`.

    Raises ImageDataError: a name is not UTF-8, so that no run could list it.
    """
    paths = sorted(p for p in directory.iterdir() if p.name[0] != "." or p.name in hidden)
    for path in paths:
        try:
            path.name.encode()
        except UnicodeEncodeError:
            raise ImageDataError(
                f"{directory}: the name {bytes(Path(path.name))!r} is not UTF-8; rename it"
            ) from None
    return paths


def _some(paths: Sequence[Path]) -> str:
    """The first few names, as a message has them."""
    names = [f"{path.name}/" if path.is_dir() else path.name for path in paths[:3]]
    return ", ".join([*names, "..."] if len(paths) > 3 else names) or "nothing"


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
