"""A beam search over translations that began at different times, whose keys and values lie in pages.

The rows of a batch are a list of tensors, one row of each for a translation that runs; the pool is a list of the pages
of all layers (core/kernels/paged.py). Methods run inside of a tf.function, with TensorFlow's own kernels.

Letters: B row, J hypothesis, S source token, or a place of a flat sequence, U page that the batch reads, W page of a
row's table.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from lingvo_moe.core import kernels
from lingvo_moe.core.decode.flat_beam_search import FlatBeamSearch, SearchOptions, StepFn
from lingvo_moe.core.decode.pages import PAGE
from lingvo_moe.core.kernels import paged
from lingvo_moe.core.nested_map import NestedMap, map_structure
from lingvo_moe.core.sharding import single_device, use_mesh
from lingvo_moe.core.tensors import dim
from lingvo_moe.tasks.mt.decode_step import Decoder, with_first
from lingvo_moe.tasks.text.decoding.growing_beam_search import GrowingBeamSearch, open_shape
from lingvo_moe.tasks.text.decoding.saved_weights import PackedWeights

SOURCE_STEP = 16  # tokens: the sources of a batch are padded to a multiple of it


class StaggeredSearch(GrowingBeamSearch):
    """The search with a time for each row."""

    STATE_LETTERS = NestedMap(FlatBeamSearch.STATE_LETTERS, time="B")

    def Start(self, max_lengths_B: tf.Tensor, steps: int | None = None) -> NestedMap:
        """See FlatBeamSearch."""
        state = super().Start(max_lengths_B, steps)
        return NestedMap(state, time=tf.zeros_like(max_lengths_B))

    def Ids(self, state: NestedMap) -> tf.Tensor:
        """See FlatBeamSearch."""
        # The time of a row that is done goes on, to where there are no places.
        at_BJ = tf.minimum(self.Places(state.time), dim(state.ids_BS, 1) - 1)
        return tf.gather(state.ids_BS, at_BJ, batch_dims=1)

    def Places(self, time_B: tf.Tensor) -> tf.Tensor:
        """The places [B,J] of the hypotheses' tokens at each row's time."""
        return time_B[:, tf.newaxis] * self.J + tf.range(self.J)


class PagedDecoder(Decoder):
    """A model on a CPU and a search over its translations, which join and leave between two blocks of steps.

    Args:
        weights: of an MtModel, or of another TranslationModel.
        max_length, vocab_size: as of FastDecoder.
        of_rows: the names of what sources have beside their tokens and caches keep: `first`, or none.

    Attributes:
        row_letters: of the tensors of rows; P is a place of a flat sequence there, S a source token.
    """

    def __init__(
        self,
        weights: PackedWeights,
        options: SearchOptions,
        max_length: int,
        vocab_size: int,
        of_rows: Sequence[str] = (),
    ):
        super().__init__(weights.model, options, max_length, vocab_size)
        self._weights, self._J = weights, options.beam_size
        self.search = StaggeredSearch(max_length, options, self.search.allowed_V)
        with _kernels(paged.nowhere()):
            cache = self.CacheLetters(NestedMap(dict.fromkeys(of_rows)))
        state = self.search.STATE_LETTERS.Transform(lambda letters: letters.replace("S", "P"))
        self._letters = NestedMap(state=state, cache=cache, lengths="B")
        self.row_letters = [x for x in self._letters.Flatten() if not _is_pool(x)]

    def Enter(self, src: NestedMap, max_lengths_B: tf.Tensor) -> list[tf.Tensor]:
        """Encodes sources; arguments as of Decoder.Search. Returns the rows of translations that begin."""
        cache = self._EmptyCache(src, 1)
        state = self.search.Start(max_lengths_B, 1)
        lengths_B = tf.reduce_sum(src.segment_ids, 1)
        return self._Apart(NestedMap(state=state, cache=cache, lengths=lengths_B))[0]

    def Pool(self, src: NestedMap, pages: tf.Tensor) -> list[tf.Tensor]:
        """Empty pages of all layers; `src` is any source."""
        cache = self._EmptyCache(src, PAGE)
        _, one_page = self._Apart(NestedMap(self._letters, cache=cache))
        return [
            tf.raw_ops.Empty(shape=tf.stack([pages, *x.shape[1:]]), dtype=x.dtype, init=True)
            for x in one_page
        ]

    def Keep(self, rows: Sequence[tf.Tensor], at_B: tf.Tensor) -> list[tf.Tensor]:
        """Some of the rows, with no more places for sources than these need."""
        lengths_B = tf.gather(self._Together(rows).lengths, at_B)
        longest = tf.reduce_max(tf.concat([[0], lengths_B], 0))
        size = (longest + (SOURCE_STEP - 1)) // SOURCE_STEP * SOURCE_STEP

        def picked(x: tf.Tensor, letters: str) -> tf.Tensor:
            y = tf.gather(x, at_B, axis=letters.index("B"))
            sizes = [size if letter == "S" else -1 for letter in letters]
            return tf.slice(y, [0] * len(sizes), sizes) if "S" in letters else y

        return [picked(x, letters) for x, letters in zip(rows, self.row_letters, strict=True)]

    def Join(self, rows: Sequence[tf.Tensor], new: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Rows and others behind them, with places for the longest of all."""

        def joined(x: tf.Tensor, y: tf.Tensor, letters: str) -> tf.Tensor:
            sizes = tf.maximum(tf.shape(x), tf.shape(y))
            others = [letter != "B" for letter in letters]
            parts = [tf.pad(z, _behind(tf.where(others, sizes - tf.shape(z), 0))) for z in (x, y)]
            return tf.concat(parts, letters.index("B"))

        return [joined(*three) for three in zip(rows, new, self.row_letters, strict=True)]

    def Block(
        self,
        rows: Sequence[tf.Tensor],
        pool: Sequence[tf.Tensor],
        table_BW: tf.Tensor,
        steps: int,
    ) -> tuple[list[tf.Tensor], list[tf.Tensor], tf.Tensor]:
        """Takes some steps, or fewer where all rows are done before.

        Args:
            table_BW: int32, the pages of each row in the order of its tokens, enough for these steps; then 0.

        Returns:
            The rows, the pool, which was overwritten, and the number of steps, int32.
        """
        num_rows, most = dim(table_BW, 0), dim(table_BW, 1) * PAGE
        letters = NestedMap(rows=self.row_letters, table="BW")
        lengths_B, filled = self.search.Filled(
            table_BW[:, 0], NestedMap(rows=[*rows], table=table_BW), letters
        )
        tree, table = self._Together(filled.rows, pool), _Table.Of(filled.table, self._J)
        # A step writes where the next one finds its tokens.
        places = (most // self._J + 1) * self._J
        state = map_structure(
            lambda x, one: _with_places(x, one, places), tree.state, self._letters.state
        )
        state.done_B |= tf.range(dim(lengths_B, 0)) >= num_rows
        theta = self._weights.Theta()

        def unfinished(count: tf.Tensor, state: NestedMap, pool: list) -> tf.Tensor:
            del pool
            return (count < steps) & ~tf.reduce_all(state.done_B)

        def step(count: tf.Tensor, state: NestedMap, pool: list) -> tuple:
            before = self._Together(self._Apart(tree)[0], pool)
            after, cache = self.search.Step(self._PagedStep(theta, table), state, before.cache)
            for x, y in after.Zip(state):
                x.set_shape(y.shape)
            _, pool = self._Apart(NestedMap(tree, cache=cache))
            return count + 1, after, pool

        shapes = (
            tf.TensorShape([]),
            map_structure(_open, state, self._letters.state),
            [x.shape for x in pool],
        )
        with _kernels(paged.nowhere()):
            count, state, after = tf.while_loop(
                unfinished, step, (0, state, [*pool]), shapes, parallel_iterations=1
            )
        rows, _ = self._Apart(NestedMap(tree, state=state))
        return [_first(x, one, num_rows) for x, one in zip(rows, self.row_letters)], after, count

    def Results(self, rows: Sequence[tf.Tensor]) -> NestedMap:
        """The results so far; see FlatBeamSearch."""
        results: NestedMap = self.search.Results(self._Together(rows).state)
        return results

    def Done(self, rows: Sequence[tf.Tensor]) -> tf.Tensor:
        """Whether each row is done, bool [B]."""
        done_B: tf.Tensor = self._Together(rows).state.done_B
        return done_B

    def _EmptyCache(self, src: NestedMap, slots: int) -> NestedMap:
        """The caches of sources, with pages of so many slots as there are sources."""
        theta = self._weights.Theta()
        with _kernels(paged.nowhere()):
            return self._InitCache(theta, src, self.model.Encode(theta, src), slots)

    def _PagedStep(self, theta: NestedMap, table: "_Table") -> StepFn:
        def step(ids: tf.Tensor, cache: Any, time_B: tf.Tensor, mask_BJS: tf.Tensor) -> tuple:
            time_B1 = time_B[:, tf.newaxis]
            with _kernels(table.Places(self.search.Places(time_B))):
                logits, cache = self.model.ExtendStep(
                    theta, ids, cache, time_B1, table.Mask(mask_BJS)
                )
            return with_first(logits[..., : self._vocab_size], cache, time_B1), cache

        return step

    def _Together(self, rows: Sequence[tf.Tensor], pool: Sequence[Any] | None = None) -> NestedMap:
        """The tree of rows and a pool, `state`, `cache` and `lengths`; with None where there is no pool."""
        of_rows, of_pool = iter(rows), iter(pool or ())
        return self._letters.Pack(
            [next(of_pool, None) if _is_pool(x) else next(of_rows) for x in self._letters.Flatten()]
        )

    def _Apart(self, tree: NestedMap) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """The rows and the pool of a tree."""
        rows: list[tf.Tensor] = []
        pool: list[tf.Tensor] = []
        for x, letters in zip(tree.Flatten(), self._letters.Flatten(), strict=True):
            (pool if _is_pool(letters) else rows).append(x)
        return rows, pool


@dataclass(frozen=True)
class _Table:
    """The pages of rows, as attention reads them.

    Attributes:
        table_BW: int32, the pages of each row, then 0.
        at_U2: int32, a row and a place in the table for each page that is read.
        hypotheses: J.
    """

    table_BW: tf.Tensor
    at_U2: tf.Tensor
    hypotheses: int

    @classmethod
    def Of(cls, table_BW: tf.Tensor, hypotheses: int) -> "_Table":
        # A row without pages reads page 0.
        first_W = tf.range(dim(table_BW, 1)) == 0
        at_U2 = tf.cast(tf.where((table_BW > 0) | first_W), tf.int32)
        return cls(table_BW, at_U2, hypotheses)

    def Places(self, at_BJ: tf.Tensor) -> paged.PagePlaces:
        """The places in pages of the tokens at some places of their rows."""
        last = dim(self.table_BW, 1) - 1
        page_BJ = tf.gather(self.table_BW, tf.minimum(at_BJ // PAGE, last), batch_dims=1)
        owner_U, column_U = tf.unstack(self.at_U2, axis=1)
        page_U = tf.gather_nd(self.table_BW, self.at_U2)
        return paged.PagePlaces(
            page_BJ * PAGE + at_BJ % PAGE, page_U, owner_U, column_U * PAGE, self.hypotheses
        )

    def Mask(self, mask_BJP: tf.Tensor) -> tf.Tensor:
        """The part of a mask for each page, [U,J,PAGE]."""
        rows, width = dim(self.table_BW, 0), dim(self.table_BW, 1)
        shape = [rows, self.hypotheses, width, PAGE]
        mask = tf.reshape(mask_BJP[:, :, : width * PAGE], shape)
        return tf.gather_nd(tf.transpose(mask, [0, 2, 1, 3]), self.at_U2)


@contextlib.contextmanager
def _kernels(places: paged.PagePlaces) -> Iterator[None]:
    with use_mesh(single_device()), kernels.using(paged.kernels_of(places)):
        yield


def _is_pool(letters: str) -> bool:
    """Whether a tensor of these letters has pages, and no rows."""
    return "L" in letters


def _open(x: tf.Tensor, letters: str) -> tf.TensorShape:
    return open_shape(x, letters.replace("P", "S"))


def _with_places(x: tf.Tensor, letters: str, places: int | tf.Tensor) -> tf.Tensor:
    """A tensor of a state with so many places."""
    if "P" not in letters:
        return x
    y = x[..., :places]
    room = [places - tf.shape(y)[-1] if letter == "P" else 0 for letter in letters]
    return tf.pad(y, _behind(tf.stack(room)))


def _first(x: tf.Tensor, letters: str, count: int | tf.Tensor) -> tf.Tensor:
    """The first rows."""
    sizes = [count if letter == "B" else -1 for letter in letters]
    return tf.slice(x, [0] * len(sizes), sizes)


def _behind(room: tf.Tensor) -> tf.Tensor:
    """The padding for tf.pad behind each dimension."""
    return tf.stack([tf.zeros_like(room), room], 1)
