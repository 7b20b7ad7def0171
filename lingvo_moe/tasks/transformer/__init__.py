"""The Transformer of tasks over texts, with one stack of layers or two."""
