"""Shared parts of the tests of published weights."""

from lingvo_moe.core.weights.open_source import open_source


def tensors_of(directory):
    """All tensors of a checkpoint, by name."""
    source = open_source(directory)
    return {name: source.Read(name) for name in source.entries}


def assert_same_tensors(there, here):
    """Raises AssertionError unless the tensors have the same names, types, shapes and bytes."""
    assert there.keys() == here.keys()
    for name, tensor in there.items():
        assert (tensor.dtype, tensor.shape) == (here[name].dtype, here[name].shape), name
        assert tensor.tobytes() == here[name].tobytes(), name


def write_texts(directory):
    """Makes a directory with texts of the tokens of the checkpoints' tokenizer."""
    directory.mkdir()
    texts = (" ".join(f"<{i % 37}>" for i in range(n)) for n in range(3, 60))
    (directory / "a.txt").write_text("\n".join(texts))
    return directory
