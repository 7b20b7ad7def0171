"""Inputs of image classification: endless batches for training, and held-out images, each once.

Letters: B row of the batch, Y rows of an image, X columns, I channels.

A batch is a function of a number alone, the number of examples before it: the order of an epoch is a keyed
permutation, and the crop of an example is keyed by the seed, the epoch and the example.
"""

import abc
import functools
import json
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ClassVar, Self

import numpy as np

from lingvo_moe.core.config import checks
from lingvo_moe.core.config.hyperparams import InstantiableParams, Params as HyperParams
from lingvo_moe.core.files.artifacts import RunArtifacts
from lingvo_moe.core.input import base_input
from lingvo_moe.core.input.base_input import (
    ArraySpec,
    BaseInput,
    HeldOutBatch,
    Progress,
    quiet,
)
from lingvo_moe.core.input.input_errors import NoHeldOutError
from lingvo_moe.core.input.permutation import permute
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.tasks.image.input.crops import generator, middle_box, random_box, resized
from lingvo_moe.tasks.image.input.sources import (
    SUFFIXES,
    ImageDataError,
    OtherImagesError,
    Split,
    digits_splits,
    folder_splits,
)

CLASSES_FILE = "classes.json"
_PADDING = -1  # the label of a row without an image
_CHANNELS = checks.AnyOf((checks.Integer(1, 1), checks.Integer(3, 3)))


class ImageInput(BaseInput):
    """The base of image inputs: square images uint8 [B, Y, X, I] and their classes int32 [B]; see Params."""

    @classmethod
    def Params(cls) -> InstantiableParams:
        p = super().Params()
        p.Define("image_size", 224, "Y and X.", checks.SIZE)
        p.Define("channels", 3, "I: 3 for colours, 1 for shades of grey.", _CHANNELS)
        p.Define("random_crop", True, "Whether training takes a random part of each image.")
        p.Define("random_flip", True, "Whether training mirrors half of the images.")
        p.Define(
            "middle",
            0.875,
            "The side of the middle square that is taken without random_crop, in the image's shorter side.",
            checks.Number(0, 1, open_low=True),
        )
        p.Define("seed", 1234, "The seed of the order of images, crops and flips.", checks.SEED)
        return p

    def __init__(self, params: InstantiableParams):
        super().__init__(params)
        self._classes: list[str] = []
        self._train: Split | None = None
        self._held_out: Split | None = None

    @abc.abstractmethod
    def _Splits(self, began: Collection[str]) -> tuple[list[str], Split, Split | None]:
        """The classes, the images to train on, the held-out ones if there are any.

        Args:
            began: the classes of the run that goes on; none of a new one.
        """

    def BatchSpec(self) -> NestedMap:
        p = self.p
        shape = (p.batch_size, p.image_size, p.image_size, p.channels)
        return NestedMap(
            images=ArraySpec(shape, "uint8", "BYXI"), labels=ArraySpec(shape[:1], "int32", "B")
        )

    def Prepare(self, progress: Progress = quiet, artifacts: RunArtifacts | None = None) -> Self:
        """See BaseInput. Lists the images; reads none.

        Raises ImageDataError: there are none, or their classes are not those that a run began with.
        """
        if self._train is not None:
            return self
        began = json.loads(artifacts.files[CLASSES_FILE]) if artifacts is not None else []
        self._classes, self._train, self._held_out = self._Splits(began)
        held_out = len(self._held_out) if self._held_out is not None else 0
        progress(
            f"{len(self._train):,} images of {len(self._classes):,} classes to train on, {held_out:,} held out"
        )
        if artifacts is not None:
            self._CheckClasses(began)
        return self

    def _CheckClasses(self, began: list[str]) -> None:
        if began == self._classes:
            return
        different = sorted(set(began) ^ set(self._classes))
        raise ImageDataError(
            f"{self.p.name}: the run began with {len(began)} classes, the data has {len(self._classes)}. In one of "
            f"them only: {', '.join(different[:5])}. A label is a class number: use the same data or begin a new run"
        )

    def Artifacts(self) -> RunArtifacts:
        """See BaseInput: the names of the classes, in the order of their numbers, and how many there are."""
        text = json.dumps(self._classes, indent=0)
        return RunArtifacts({CLASSES_FILE: text.encode()}, {"classes": len(self._classes)})

    @property
    def classes(self) -> list[str]:
        """The names of the classes, after Prepare."""
        return list(self._classes)

    def __iter__(self) -> "ImageIterator":
        self.Prepare()
        assert self._train is not None
        return ImageIterator(self.p, self._train)

    def HeldOut(self) -> Iterator[HeldOutBatch]:
        """See BaseInput: the middle of each image. Rows without an image have the label -1.

        Raises:
            NoHeldOutError: nothing is held out.
            ImageDataError: an image cannot be read.
        """
        self.Prepare()
        if self._held_out is None:
            raise NoHeldOutError(f"{self.p.name}: no images are held out")
        reader = _ImageReader(self.p, self._held_out)
        numbers = np.arange(len(self._held_out))
        # Files are sorted by class; a keyed order lets the first batches represent all.
        order = permute(numbers, len(numbers), "held out").tolist()
        size = self.p.batch_size
        for first in range(0, len(order), size):
            examples: list[tuple[int, int | None]]
            examples = [(i, None) for i in order[first : first + size]]
            yield HeldOutBatch(_batch(self.p, enumerate(reader.Begin(examples))))


class FolderInput(ImageInput):
    """Images from files, in the layout of TensorFlow Datasets' ImageFolder: <split>/<class>/<name>.jpg."""

    READS: ClassVar[tuple[str, ...]] = ("data_dir",)
    MAY_CHANGE: ClassVar[tuple[str, ...]] = ("data_dir",)

    @classmethod
    def Params(cls) -> InstantiableParams:
        p = super().Params()
        p.Define(
            "data_dir", "", f"A directory of <split>/<class>/<name> with {', '.join(SUFFIXES)}."
        )
        p.Define("train_split", "train", "The directory of the images to train on.")
        p.Define(
            "held_out_split",
            "",
            "The directory of the held-out images; '': validation, val or test, if there is one.",
        )
        return p

    @classmethod
    def CheckSource(cls, params: HyperParams) -> None:
        if not params.data_dir:
            raise ImageDataError(
                "--data_dir is needed to train: a directory of <split>/<class>/<name>.jpg, with the split 'train'"
            )

    def _Splits(self, began: Collection[str]) -> tuple[list[str], Split, Split | None]:
        p = self.p
        return folder_splits(p.data_dir, p.train_split, p.held_out_split, began)


class DigitsInput(ImageInput):
    """scikit-learn's handwritten digits: 1,437 images of 8 x 8 pixels to train on, 360 held out."""

    @classmethod
    def Params(cls) -> InstantiableParams:
        p = super().Params()
        return p.Set(image_size=8, channels=1, random_crop=False, random_flip=False, middle=1.0)

    def _Splits(self, began: Collection[str]) -> tuple[list[str], Split, Split | None]:
        return digits_splits()


class ImageIterator(base_input.BatchIterator):
    """Batches of shuffled images, without end."""

    def __init__(self, params: HyperParams, split: Split):
        self._p, self._split = params, split
        self._reader = _ImageReader(params, split)
        self._position = 0  # examples before the next batch

    def __next__(self) -> NestedMap:
        """See BatchIterator: the rows that are not needed are padding.

        Raises ImageDataError: an image that cannot be read.
        """
        begun = self._Begin()
        self._position += self._p.batch_size
        return _batch(self._p, begun)

    def _Begin(self) -> Iterable[tuple[int, Future]]:
        """Starts to read the needed rows of the batch at the position."""
        size = len(self._split)
        places = np.arange(self._position, self._position + self._p.batch_size)
        epochs = places // size
        examples = np.empty_like(places)
        for epoch in np.unique(epochs):
            same = epochs == epoch
            examples[same] = permute(places[same] % size, size, self._p.seed, "images", int(epoch))
        rows = range(self._p.batch_size) if self.rows is None else sorted(self.rows)
        begun = self._reader.Begin([(int(examples[row]), int(epochs[row])) for row in rows])
        return zip(rows, begun, strict=True)

    def GetState(self) -> dict[str, Any]:
        return {"identity": self._identity, "position": self._position}

    def SetState(self, state: Mapping[str, Any]) -> None:
        """See BatchIterator. Raises ImageDataError: the state is of other images or another seed."""
        if set(state) != set(self.GetState()):
            raise ImageDataError(f"not a saved position of images: it holds {sorted(state)}")
        if state["identity"] != self._identity:
            raise OtherImagesError(
                f"the saved position is of other images: expected {self._identity}, saved {state['identity']}; "
                "go on with the data and the input parameters that the run began with"
            )
        self._position = int(state["position"])

    @functools.cached_property  # it reads every path of the split
    def _identity(self) -> dict[str, Any]:
        return {"images": self._split.Key(), "seed": self._p.seed}


class _ImageReader:
    """Reads and crops images of a split, several at a time."""

    def __init__(self, params: HyperParams, split: Split):
        self._p, self._split = params, split
        self._pool = ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="images")

    def Begin(self, examples: list[tuple[int, int | None]]) -> list[Future]:
        """Futures of (pixels, label) for (number in the split, epoch); without an epoch, the middle of the image."""
        return [self._pool.submit(self._Read, *example) for example in examples]

    def _Read(self, i: int, epoch: int | None) -> tuple[np.ndarray, int]:
        p = self._p
        pixels = self._split.Read(i, p.channels)
        height, width = pixels.shape[:2]
        rng = generator(p.seed, "crop", epoch, i) if epoch is not None else None
        if rng is not None and p.random_crop:
            box = random_box(rng, height, width)
        else:
            box = middle_box(height, width, p.middle)
        square = resized(pixels, box, p.image_size)
        if rng is not None and p.random_flip and rng.random() < 0.5:
            square = square[:, ::-1]
        return square, int(self._split.labels[i])


def _batch(params: HyperParams, begun: Iterable[tuple[int, Future]]) -> NestedMap:
    """Waits for the images of some rows that are being read, and makes a batch of them; other rows are padding."""
    p = params
    images = np.zeros((p.batch_size, p.image_size, p.image_size, p.channels), np.uint8)
    labels = np.full(p.batch_size, _PADDING, np.int32)
    for row, future in begun:
        images[row], labels[row] = future.result()
    return NestedMap(images=images, labels=labels)
