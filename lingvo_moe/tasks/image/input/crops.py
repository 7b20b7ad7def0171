"""Crops an image of any size to a square: at random for training, its middle for evaluation."""

import hashlib
import math

import numpy as np

# Random crops as of Szegedy et al. 2014: of the image's area, and width over height.
_AREA = (0.08, 1.0)
_LOG_RATIO = (math.log(3 / 4), math.log(4 / 3))
_ATTEMPTS = 10

Box = tuple[float, float, float, float]  # left, upper, right, lower, in pixels


def generator(*key: int | str) -> np.random.Generator:
    """Random numbers of their own for each key, e.g. (seed, epoch, example)."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))


def random_box(rng: np.random.Generator, height: int, width: int) -> Box:
    """A crop of 8 to 100 % of the area and a ratio of 3:4 to 4:3; the middle square where none fits."""
    for _ in range(_ATTEMPTS):
        area = height * width * rng.uniform(*_AREA)
        ratio = math.exp(rng.uniform(*_LOG_RATIO))
        rows, columns = round(math.sqrt(area / ratio)), round(math.sqrt(area * ratio))
        if 0 < rows <= height and 0 < columns <= width:
            top = int(rng.integers(height - rows + 1))
            left = int(rng.integers(width - columns + 1))
            return left, top, left + columns, top + rows
    return middle_box(height, width, 1.0)


def middle_box(height: int, width: int, share: float) -> Box:
    """The square in the middle whose side is a share of the image's shorter side."""
    side = share * min(height, width)
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side


def resized(pixels: np.ndarray, box: Box, size: int) -> np.ndarray:
    """A box of an image, uint8 [rows, columns, channels], scaled to [size, size, channels] without aliasing."""
    from PIL import Image

    channels = pixels.shape[-1]
    image = Image.fromarray(pixels if channels == 3 else pixels[..., 0])
    small = image.resize((size, size), Image.Resampling.BILINEAR, box=box, reducing_gap=3.0)
    return np.asarray(small).reshape(size, size, channels)
