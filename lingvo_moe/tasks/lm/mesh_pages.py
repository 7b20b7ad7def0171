"""The programs of a running batch over a mesh, and the pages that these read and write.

Each has fixed shapes: one reads tokens of prompts, one draws a block of tokens for every row of the batch. Rows of
either, and pages, lie in equal parts on the devices that share rows (kernels/paged_over_mesh.py).

Letters: as in paged_search.py; also U page of a row's table, N token of a block.
"""

import contextlib
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from lingvo_moe.core import kernels
from lingvo_moe.core.decode.pages import PAGE
from lingvo_moe.core.engine.base import Compiled, Engine
from lingvo_moe.core.kernels import paged_over_mesh
from lingvo_moe.core.moe.routers.losses_and_metrics import noting_choices
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.sharding import dims_mapping, single_device, use_mesh
from lingvo_moe.core.sharding.letters import parts_of
from lingvo_moe.core.sharding.manual import manual_region
from lingvo_moe.core.task.step import Step
from lingvo_moe.core.tensors import dim
from lingvo_moe.tasks.lm.lm_model import LmModel
from lingvo_moe.tasks.lm.paged_search import PagedSearch
from lingvo_moe.tasks.text.decoding.leading import Kind, LedPrograms, rows_over
from lingvo_moe.tasks.text.decoding.programs import letters_specs, row_specs

_DRAWN = ("tokens", "log_probs", "experts")
BLOCK = 8  # N, tokens that a program draws for a row at most


class MeshPagedSearch(PagedSearch):
    """A model and its draws over a mesh; methods run inside of a tf.function, and see all devices' rows."""

    _model: LmModel

    def Pool(self, pages: int | tf.Tensor) -> NestedMap:
        """See PagedSearch; `pages` of all parts together."""
        with self._Places():
            return self._model.InitCache(pages, PAGE)

    def PoolLetters(self) -> NestedMap:
        """The letters of the tensors of Pool."""
        with self._Places():
            return self._model.CacheLetters()

    def Extend(
        self, theta: NestedMap, places: Sequence[tf.Tensor], pool: NestedMap
    ) -> tuple[tf.Tensor, NestedMap]:
        """See PagedSearch; `places` are ids_BT, at_BT, slot_BT and page_BU, see TablePlaces."""
        ids_BT, at_BT, slot_BT, page_BU = places
        mask = tf.range(dim(page_BU, 1) * PAGE) <= at_BT[:, :, tf.newaxis]
        with self._Places(slot_BT, page_BU):
            return self._model.ExtendStep(theta, ids_BT, pool, at_BT, mask)

    def Read(self, pool: NestedMap, places: NestedMap, theta: NestedMap) -> tuple[NestedMap]:
        """The pool after tokens of prompts; `places` as of Extend, by name."""
        in_order = [places[name] for name in ("ids", "at", "slots", "pages")]
        return (self.Extend(theta, in_order, pool)[1],)

    def Block(
        self, pool: NestedMap, rows: NestedMap, theta: NestedMap
    ) -> tuple[NestedMap, NestedMap]:
        """Draws tokens of rows until all ended, N of each at most.

        Args:
            rows: int32 [B] `ids`, the newest token of each, `at`, its position, `left`, how many are drawn at most, and
                `step`, how many were before; `pages` [B,U]; `before` [B,L] as before_BL of PagedSearch.Step; `settings`
                as there.

        Returns:
            The pool; and `tokens` int32 [B,N], or END, and `log_probs` float32 [B,N], which mean nothing behind END
            and behind `left`; with experts those that the last token of each row chose, `experts` int32 [L,B,k].
        """
        none_BN = tf.zeros_like(rows.ids[:, tf.newaxis]) + tf.zeros([BLOCK], tf.int32)

        def goes_on(state: NestedMap, pool: NestedMap) -> tf.Tensor:
            del pool
            return tf.reduce_any(state.left > 0) & (state.time < BLOCK)

        def step(state: NestedMap, pool: NestedMap) -> tuple[NestedMap, NestedMap]:
            runs_B = state.left > 0
            of_newest_BU = tf.range(dim(rows.pages, 1)) == (state.at // PAGE)[:, tf.newaxis]
            page_B = tf.reduce_sum(tf.where(of_newest_BU, rows.pages, 0), 1)
            slot_B = tf.where(runs_B, page_B * PAGE, 0) + state.at % PAGE
            newest = [x[:, tf.newaxis] for x in (state.ids, state.at, slot_B)]
            with noting_choices() as experts:
                logits, pool = self.Extend(theta, [*newest, rows.pages], pool)
            logits_BV = tf.cast(logits[:, 0, : self._size], tf.float32)
            settings = NestedMap(rows.settings, step=rows.step + state.time)
            cache = NestedMap(settings=settings, seen_BV=state.seen)
            tokens_B, log_probs_B = self._Drawn(logits_BV, cache)
            now_N = tf.range(BLOCK) == state.time
            left_B = tf.where(tokens_B >= 0, state.left - 1, 0)
            state = NestedMap(
                state,
                time=state.time + 1,
                ids=tf.maximum(tokens_B, 0),
                at=state.at + tf.cast(runs_B, tf.int32),
                left=left_B,
                seen=state.seen | (tf.range(self._size) == tokens_B[:, tf.newaxis]),
                tokens=tf.where(now_N, tokens_B[:, tf.newaxis], state.tokens),
                log_probs=tf.where(now_N, log_probs_B[:, tf.newaxis], state.log_probs),
            )
            if experts:
                rows_of = [tf.reshape(one, [dim(rows.ids, 0), -1]) for one in experts]
                chosen = tf.stack(rows_of)
                before = state.get("experts", chosen)
                state.experts = tf.where(runs_B[:, tf.newaxis], chosen, before)
            return state, pool

        state = NestedMap(
            time=tf.constant(0),
            ids=rows.ids,
            at=rows.at,
            left=rows.left,
            seen=self._Seen(rows.before),
            tokens=none_BN,
            log_probs=tf.cast(none_BN, tf.float32),
        )
        if self._model.p.num_experts:
            traced = tf.function(step, autograph=False).get_concrete_function(state, pool)
            state.experts = tf.zeros(traced.structured_outputs[0].experts.shape, tf.int32)
        state, pool = tf.while_loop(goes_on, step, (state, pool))
        return pool, NestedMap({name: state[name] for name in _DRAWN if name in state})

    def _Seen(self, before_BL: tf.Tensor) -> tf.Tensor:
        """See PagedSearch; each device that of its own rows."""
        rows = dims_mapping("B.", self._model.p.activation_split)
        return manual_region(super()._Seen, [rows], rows)(before_BL)

    def _Places(self, *slots_and_pages: tf.Tensor) -> contextlib.AbstractContextManager:
        """The kernels for slot_BT and page_BU of TablePlaces; without them, for rows of no tokens."""
        p, nothing = self._model.p, tf.zeros([0, 0], tf.int32)
        slot_BT, page_BU = slots_and_pages or (nothing, nothing)
        places = paged_over_mesh.TablePlaces(slot_BT, page_BU, p.num_heads, p.activation_split)
        return kernels.using(paged_over_mesh.kernels_of(places))


class MeshPages(LedPrograms):
    """A pool of pages over a mesh, and the programs that read and write it.

    Args:
        engine: whose devices have the pages.
        theta: the weights, on its devices.
        search: of the model.
        text: determines the model and its options, with classes, so that programs can be kept.

    Attributes:
        parts: in which rows and pages lie on devices.
        num_experts: E of the model.
        turn: how often the pages were emptied; whoever did it last uses them.
        programs: how many were built; each takes seconds.
    """

    def __init__(self, engine: Engine, theta: NestedMap, search: MeshPagedSearch, text: str = ""):
        super().__init__(engine, theta)
        self._search, self._text = search, text
        self._split = search._model.p.activation_split
        self.parts = parts_of("B", engine.mesh, [self._split])
        self.num_experts = search._model.p.num_experts
        self.turn, self._pages = 0, 0
        self._pool: NestedMap = NestedMap()
        self._built: dict[tuple, Compiled] = {}

    @property
    def programs(self) -> int:
        return len(self._built)

    def Specs(self, pages: int) -> NestedMap:
        """The TensorSpecs of a pool of so many pages in each part, beside page 0."""
        search, count = self._search, (pages + 1) * self.parts
        with use_mesh(single_device()):
            empty = tf.function(lambda: search.Pool(count), autograph=False)
            tensors = empty.get_concrete_function().structured_outputs
        return letters_specs(tensors, search.PoolLetters(), self._split)

    def RowsOf(self, rows: int) -> int:
        """The number of rows of a program that has room for so many in each part."""
        return rows_over(self.engine, self._split, rows * self.parts)

    def Empty(self, pages: int) -> int:
        """Makes so many pages in each part, beside page 0, in the place of those that there were. Returns the turn."""
        self.Run((0,), NestedMap(pages=np.array(pages)))
        return self.turn

    def Read(self, places: NestedMap) -> None:
        """Reads tokens: see MeshPagedSearch; NumPy arrays. All processes of the job do."""
        self.Run((1, *places.ids.shape, places.pages.shape[1]), places)

    def Block(self, rows: NestedMap) -> NestedMap:
        """Draws tokens likewise; the result is of NumPy arrays."""
        return self.Run((2, *rows.pages.shape), rows)

    def Run(self, kind: Kind, inputs: NestedMap) -> NestedMap:
        """See LedPrograms: kinds are those of Empty, Read and Block."""
        self.Tell(kind, inputs)
        if kind == (0,):
            self._pages, self._pool = int(inputs.pages), NestedMap()
            (self._pool,) = self._Built(kind, inputs)()
            self.turn += 1
            return NestedMap()
        results = self._Built(kind, inputs)(self._pool, inputs, self.theta)
        self._pool = results[0]
        return self.engine.Get(results[1]) if kind[0] == 2 else NestedMap()

    def _Built(self, kind: Kind, inputs: NestedMap) -> Compiled:
        key = self._pages, kind
        if key not in self._built:
            search, text = self._search, f"{self._text}\n{key}" if self._text else ""
            pool = self.Specs(self._pages)
            if kind == (0,):
                count = (self._pages + 1) * self.parts
                step = Step(
                    "empty_pages", lambda: (search.Pool(count),), (), results=(pool,), text=text
                )
            else:
                name, fn = (
                    ("read_block", search.Read) if kind[0] == 1 else ("draw_block", search.Block)
                )
                rows, theta = row_specs(inputs, self._split), search._model.VariableSpecs()
                step = Step(name, fn, (pool, rows, theta), (0,), text=text)
            self._built[key] = self.engine.BuildStep(step)
        return self._built[key]
