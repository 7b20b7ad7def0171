"""Images: the layout of folders, crops, batches that resume, held-out images, and clear errors."""

import json
import os
import shutil
import struct
import tempfile

import numpy as np
import pytest
from PIL import Image
from refusals import refuses

from lingvo_moe.core.files.artifacts import RunArtifacts
from lingvo_moe.core.input.input_errors import NoHeldOutError
from lingvo_moe.tasks.image.input.crops import generator, middle_box, random_box, resized
from lingvo_moe.tasks.image.input.image_input import CLASSES_FILE, DigitsInput, FolderInput
from lingvo_moe.tasks.image.input.sources import (
    FolderSplit,
    ImageDataError,
    digits_splits,
    folder_splits,
)

COLOURS = {"blue": (0, 0, 250), "green": (0, 250, 0), "red": (250, 0, 0)}


@pytest.fixture
def folder(tmp_path):
    """Images of one colour each: 4 of each of three classes to train on, 2 of two classes held out."""
    for split, classes, number in (("train", COLOURS, 4), ("val", ["green", "red"], 2)):
        for name in classes:
            directory = tmp_path / split / name
            directory.mkdir(parents=True)
            for i in range(number):
                image = Image.new("RGB", (30 + i, 20), COLOURS[name])
                image.save(directory / f"{i}.{'png' if i % 2 else 'jpg'}")
    (tmp_path / "train" / "red" / "notes.txt").write_text("no image")
    return tmp_path


def _input(folder, **kwargs):
    p = FolderInput.Params().Set(data_dir=str(folder), image_size=8, batch_size=5)
    return p.Set(**kwargs).Instantiate()


def _take(batches, number):
    return [next(batches) for _ in range(number)]


def _assert_equal(a, b):
    for x, y in zip(a, b, strict=True):
        np.testing.assert_array_equal(x.images, y.images)
        np.testing.assert_array_equal(x.labels, y.labels)


def test_folders_are_read_as_by_tensorflow_datasets(folder, tmp_path_factory, monkeypatch):
    import tensorflow_datasets as tfds

    # Its builders leave a directory there.
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("temporary")))
    classes, train, held_out = folder_splits(str(folder), "train", "")
    builder = tfds.folder_dataset.ImageFolder(str(folder))
    assert classes == builder.info.features["label"].names
    for name, split in (("train", train), ("val", held_out)):
        counts = np.zeros(3, int)
        for example in tfds.as_numpy(builder.as_dataset(split=name)):
            counts[example["label"]] += 1
        np.testing.assert_array_equal(np.bincount(split.labels, minlength=3), counts)
    for i, label in enumerate(train.labels):
        pixels = train.Read(i, 3)
        assert pixels.shape == (20, 30 + i % 4, 3)
        assert np.abs(pixels.mean((0, 1)) - COLOURS[classes[label]]).max() < 5


def test_batches_show_each_image_once_an_epoch(folder):
    batches = iter(_input(folder, batch_size=4))
    for _ in range(2):
        labels = np.concatenate([batch.labels for batch in _take(batches, 3)])
        assert sorted(labels) == [0] * 4 + [1] * 4 + [2] * 4
    batch = next(batches)
    assert (batch.images.shape, batch.images.dtype) == ((4, 8, 8, 3), np.uint8)
    for pixels, label in zip(batch.images, batch.labels, strict=True):
        colour = COLOURS[sorted(COLOURS)[label]]
        assert np.abs(pixels.mean((0, 1)) - colour).max() < 5


@pytest.mark.parametrize("kind", ["folder", "digits"])
def test_a_saved_position_gives_the_same_batches(kind, folder):
    def begin():
        return iter(_input(folder) if kind == "folder" else DigitsInput.Params().Instantiate())

    batches = begin()
    _take(batches, 3)  # of the folder: into the second epoch
    state = batches.GetState()
    want = _take(batches, 3)
    resumed = begin()
    resumed.SetState(state)
    _assert_equal(_take(resumed, 3), want)
    again = begin()
    _take(again, 6)
    assert again.GetState() == resumed.GetState()


def test_rows_of_processes_are_those_of_one_and_others_are_not_read(folder, monkeypatch):
    inputs, read = _input(folder, batch_size=5), []
    whole = _take(iter(inputs), 4)
    of_split = FolderSplit.Read
    monkeypatch.setattr(
        FolderSplit, "Read", lambda self, i, n: read.append(i) or of_split(self, i, n)
    )
    for rows in ([0, 3], [1, 2, 4], []):
        batches = iter(inputs)
        batches.rows = rows
        read.clear()
        for mine, all_rows in zip(_take(batches, 4), whole):
            np.testing.assert_array_equal(mine.images[rows], all_rows.images[rows])
            np.testing.assert_array_equal(mine.labels[rows], all_rows.labels[rows])
        assert len(read) == 4 * len(rows)


def test_a_position_of_other_images_or_another_seed_is_refused(folder):
    state = iter(_input(folder)).GetState()
    with pytest.raises(ImageDataError, match="of other images"):
        iter(_input(folder, seed=5)).SetState(state)
    (folder / "train" / "red" / "0.jpg").unlink()
    with pytest.raises(ImageDataError, match="of other images"):
        iter(_input(folder)).SetState(state)


def test_held_out_images_come_once_and_the_last_batch_is_padded(folder):
    batches = [one.batch for one in _input(folder, batch_size=3).HeldOut()]
    labels = [list(batch.labels) for batch in batches]
    assert sorted(labels[0] + labels[1][:1]) == [1, 1, 2, 2] and labels[1][1:] == [-1, -1]
    assert not np.any(batches[1].images[1:])
    _assert_equal(batches, [one.batch for one in _input(folder, batch_size=3).HeldOut()])


def test_digits_are_held_out_for_good():
    classes, train, held_out = digits_splits()
    assert (len(train), len(held_out), classes) == (1437, 360, [str(i) for i in range(10)])
    assert held_out.Key() == "42053f43b313d3e8859b4259fe13ebfd"
    assert np.bincount(held_out.labels).min() >= 25
    inputs = DigitsInput.Params().Set(batch_size=64).Instantiate()
    batches = [one.batch for one in inputs.HeldOut()]
    images = np.concatenate([batch.images for batch in batches])
    assert (images == held_out.Read(0, 1)).all(axis=(1, 2, 3)).any()
    assert images.max() == 255
    labels = np.concatenate([batch.labels for batch in batches])
    assert sorted(labels[labels >= 0]) == sorted(held_out.labels)
    assert set(batches[0].labels) == set(range(10))  # the first batch represents all


def test_crops():
    boxes = [random_box(generator(1, i), 60, 40) for i in range(200)]
    assert boxes == [random_box(generator(1, i), 60, 40) for i in range(200)]
    for left, top, right, bottom in boxes:
        assert 0 <= left < right <= 40 and 0 <= top < bottom <= 60
    areas = np.array([(right - left) * (bottom - top) for left, top, right, bottom in boxes]) / 2400
    assert areas.min() < 0.15 and areas.max() > 0.6 and 0.3 < areas.mean() < 0.7
    assert middle_box(60, 40, 0.5) == (10, 20, 30, 40)
    assert random_box(generator(0), 1, 100) == (49.5, 0, 50.5, 1)  # nothing fits
    ramp = np.repeat(np.arange(100, dtype=np.uint8)[:, None, None], 100, 1)
    small = resized(ramp, (0, 20, 40, 60), 4)[:, 0, 0]
    np.testing.assert_allclose(small, [24.5, 34.5, 44.5, 54.5], atol=1.5)


def test_flips_are_drawn_for_each_image_and_epoch(folder):
    shutil.rmtree(folder / "train")
    (folder / "train" / "red").mkdir(parents=True)
    half = np.zeros((20, 20, 3), np.uint8)
    half[:, :10] = 255
    for i in range(8):
        Image.fromarray(half).save(folder / "train" / "red" / f"{i}.png")
    batches = iter(_input(folder, batch_size=8, random_crop=False, middle=1.0))
    left = [tuple(batch.images[:, 0, 0, 0] > 128) for batch in _take(batches, 4)]
    assert len(set(left)) > 1
    assert 8 < sum(map(sum, left)) < 24
    still = next(iter(_input(folder, batch_size=8, random_crop=False, random_flip=False)))
    assert np.all(still.images[:, 0, 0] > 128)


def test_a_broken_image_is_named(folder):
    broken = folder / "train" / "green" / "2.jpg"
    broken.write_bytes(broken.read_bytes()[:200])
    with pytest.raises(ImageDataError, match=r"train/green/2\.jpg: cannot be read as an image"):
        _take(iter(_input(folder)), 3)


def test_shades_of_more_than_8_bits_are_scaled_by_their_range(folder):
    shades = np.array([[0, 256, 32767], [32768, 65280, 65535]], np.uint16)
    want = np.array([[0, 1, 127], [128, 255, 255]], np.uint8)
    red = folder / "train" / "red"
    Image.fromarray(shades).save(red / "0.png")
    Image.fromarray(shades).save(red / "1.tif")
    Image.fromarray((want / 255).astype(np.float32)).save(red / "2.tiff")
    for channels in (1, 3):
        split = FolderSplit([red / "0.png", red / "1.tif", red / "2.tiff"], [0] * 3, folder)
        for i in range(3):
            expected = np.repeat(want[..., None], channels, -1)
            np.testing.assert_array_equal(split.Read(i, channels), expected)


def test_a_tiff_of_12_bits_is_scaled_by_12_bits(tmp_path):
    """Its 2 x 2 shades are 0, 128, 2048 and 4095; Pillow reads such files and writes none."""
    tags = {256: 2, 257: 2, 258: 12, 259: 1, 262: 1, 273: 8, 277: 1, 278: 2, 279: 6}
    content = b"II*\0" + struct.pack("<I", 14) + bytes.fromhex("000080800fff")
    content += struct.pack("<H", len(tags))
    content += b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
    (tmp_path / "1.tif").write_bytes(content + bytes(4))
    pixels = FolderSplit([tmp_path / "1.tif"], [0], tmp_path).Read(0, 1)
    assert pixels[..., 0].tolist() == [[0, 8], [128, 255]]


@pytest.mark.parametrize("shades, message", [
    (np.full((2, 2), 70_000, np.int32), "mode I, integers of 32 bits or with a sign"),
    (np.full((2, 2), np.nan, np.float32), "mode F, floats from nan to nan: black must be 0"),
])  # fmt: skip
def test_shades_of_an_unknown_range_are_refused(shades, message, tmp_path):
    path = tmp_path / "1.tif"
    Image.fromarray(shades).save(path)
    with pytest.raises(ImageDataError, match=rf"1\.tif: cannot be read as an image .{message}"):
        FolderSplit([path], [0], tmp_path).Read(0, 1)


def test_every_format_is_read(folder):
    (folder / "train" / "white").mkdir()
    suffixes = (".bmp", ".gif", ".tif", ".tiff", ".webp", ".WEBP")
    for suffix in suffixes:
        Image.new("RGB", (9, 9), "white").save(folder / "train" / "white" / f"1{suffix}")
    _, train, _ = folder_splits(str(folder), "train", "")
    assert all(train.Read(i, 3).min() == 255 for i in range(len(train) - 6, len(train)))


def test_hidden_names_are_no_classes_but_those_of_a_run_that_goes_on(folder):
    hidden = folder / "train" / ".ipynb_checkpoints"
    hidden.mkdir()
    Image.new("RGB", (9, 9)).save(hidden / "1-checkpoint.png")
    (folder / "train" / "red" / "._1.png").write_bytes(b"of a Mac")
    assert _input(folder).Prepare().classes == ["blue", "green", "red"]
    assert len(folder_splits(str(folder), "train", "")[1]) == 12
    began = [hidden.name, "blue", "green", "red"]
    artifacts = RunArtifacts(files={CLASSES_FILE: json.dumps(began).encode()})
    assert _input(folder).Prepare(artifacts=artifacts).classes == began


def test_files_that_are_no_images_are_counted(folder, caplog):
    _input(folder).Prepare()
    message = "train: 1 files or directories beside the images are not read, e.g. red/notes.txt"
    assert message in caplog.text


@pytest.mark.parametrize("name", [b"red/\xff.png", b"\xff"])
def test_a_name_that_is_not_utf8_is_named(name, folder):
    os.mkdir(path := os.fsencode(folder / "train") + b"/" + name)
    with pytest.raises(ImageDataError, match=r"the name b'\\xff(.png)?' is not UTF-8; rename it"):
        _input(folder).Prepare()
    os.rmdir(path)


@refuses(
    ImageDataError,
    ("", {"data_dir": "nowhere"}, "nowhere: no such directory"),
    ("", {"train_split": "training"}, r"has no directory 'training' .did you mean 'train'"),
    ("", {"held_out_split": "dev"}, "has no directory 'dev'"),
    ("empty", {"train_split": "empty"}, "empty: holds no images; expected <split>/<class>"),
    ("train/white", {}, "white: a class without images: it holds nothing; "),
    ("train/white/1999", {}, "white: a class without images: it holds 1999/; "),
)
def test_what_is_missing_is_named(made, change, folder):
    (folder / made).mkdir(parents=True, exist_ok=True)
    _input(folder, **change).Prepare()


def test_nothing_held_out(folder):
    (folder / "val").rename(folder / "other")
    with pytest.raises(NoHeldOutError, match="no images are held out"):
        next(_input(folder).HeldOut())


def test_a_run_goes_on_with_the_classes_that_it_began_with(folder):
    artifacts = _input(folder).Prepare().Artifacts()
    lines = []
    again = _input(folder).Prepare(lines.append, artifacts)
    assert again.classes == ["blue", "green", "red"]
    assert lines == ["12 images of 3 classes to train on, 4 held out"]
    other = RunArtifacts(files={CLASSES_FILE: b'["blue", "green", "white"]'})
    with pytest.raises(ImageDataError, match=r"only: red, white\. .* use the same data"):
        _input(folder).Prepare(artifacts=other)
