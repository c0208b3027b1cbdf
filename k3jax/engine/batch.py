"""From a plan in integers to the padded arrays of a step."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from k3jax.config import K3Config
from k3jax.engine.request import SamplingParams, TokenConstraint
from k3jax.engine.sampling import SamplingInputs
from k3jax.engine.sequence import NO_SLOT, Row, Sequence, StepPlan
from k3jax.engine.step import ImageInputs, StepInputs
from k3jax.state import Spans


class _ByRow(NamedTuple):
    """What is known of a step's rows by their lanes alone."""

    lanes: Any
    sampling: SamplingInputs
    """`generated` is not of it."""
    wants_logprobs: Any


class Packer:
    """Keeps what does not change from step to step by lane, so that packing a step is indexing.

    `contexts` are the buckets, in tokens, for the width of the page table. Lane `max_rows` is
    that of padding rows. `media_embedding` is what a media token means that no image stands for:
    one that the model itself has generated.
    """

    def __init__(
        self,
        config: K3Config,
        *,
        max_rows: int,
        page_size: int,
        contexts: tuple[int, ...],
        media_embedding: np.ndarray | None = None,
    ):
        self._config = config
        self._media_embedding = media_embedding
        self._padding = max_rows
        self._contexts = [-(-context // page_size) for context in contexts]
        self._page_size = page_size
        self._table = np.zeros((max_rows + 1, self._contexts[-1]), np.int32)
        self._num_pages = [0] * (max_rows + 1)
        self._sampling = SamplingInputs.pack(
            [SamplingParams()] * (max_rows + 1), [0] * (max_rows + 1)
        )
        self._wants = np.zeros(max_rows + 1, np.bool_)
        self._words = -(-config.vocab_size // 32)
        self._last_word = 0xFFFFFFFF >> -config.vocab_size % 32
        self._anything: dict[int, jax.Array] = {}
        self._by_row: tuple[bytes, _ByRow] | None = None

    @property
    def context_pages(self) -> list[int]:
        """The buckets of the page table's width."""
        return self._contexts

    def admit(self, sequence: Sequence) -> None:
        """The sequence begins, or comes back, in its lane."""
        lane, sampling = sequence.lane, sequence.sampling
        self._num_pages[lane] = 0
        one = SamplingInputs.pack([sampling], [0])
        for column, value in zip(
            jax.tree.leaves(self._sampling), jax.tree.leaves(one), strict=True
        ):
            column[lane] = value[0]
        self._wants[lane] = sampling.logprobs is not None
        self._by_row = None

    def pack(self, plan: StepPlan) -> StepInputs:
        """The arrays of one step."""
        rows = plan.rows
        lanes = [row.sequence.lane for row in rows]
        for row in rows:
            self._note_pages(row)
        tokens = np.zeros((plan.num_rows, plan.width), np.int32)
        for number, row in enumerate(rows):
            if not row.decodes:
                end = row.start + row.length
                tokens[number, : row.length] = row.sequence.tokens[row.start : end]
        is_prefill = plan.width > 1
        return self._inputs(
            tokens,
            context=plan.context,
            lanes=lanes,
            columns=[(r.length, r.start, r.read_slot, r.write_slot, r.generated) for r in rows],
            emits=[row.emits for row in rows],
            decodes=[row.decodes for row in rows],
            copies=[row.copy or (-1, 0) for row in rows] if is_prefill else None,
            masks=self._masks(plan),
            images=self._images(plan),
        )

    def idle(
        self, num_rows: int, width: int, context_pages: int, *, images: bool = False
    ) -> StepInputs:
        """A step of padding rows alone: it changes nothing, and compiles the bucket."""
        features = None
        if images:
            features = ImageInputs(
                np.zeros((width, self._config.hidden_size), np.float32), np.zeros(1, np.int32)
            )
        return self._inputs(
            np.zeros((num_rows, width), np.int32),
            context=context_pages * self._page_size,
            lanes=[],
            columns=[],
            emits=[],
            decodes=[],
            copies=[] if width > 1 else None,
            masks=self._all_allowed(num_rows),
            images=features,
        )

    def _inputs(
        self,
        tokens: np.ndarray,
        *,
        context: int,
        lanes: list[int],
        columns: list[tuple[int, ...]],
        emits: list[bool],
        decodes: list[bool],
        copies: list[tuple[int, int]] | None,
        masks: jax.Array | np.ndarray,
        images: ImageInputs | None,
    ) -> StepInputs:
        rows = len(tokens)
        padding = rows - len(lanes)
        numbers = np.array([*columns, *[(0, 0, NO_SLOT, NO_SLOT, 0)] * padding], np.int32).T
        lengths, starts, reads, writes, generated = np.ascontiguousarray(numbers)
        lane = np.array([*lanes, *[self._padding] * padding], np.int32)
        pages = next(n for n in self._contexts if n * self._page_size >= context)
        by_row = self._lane_values(lane)
        return StepInputs(
            tokens=tokens,
            spans=Spans(
                lengths=lengths,
                starts=starts,
                read_slots=reads,
                write_slots=writes,
                page_table=self._table[lane, :pages],
            ),
            lanes=by_row.lanes,
            emits=np.array([*emits, *[False] * padding], np.bool_),
            sampling=by_row.sampling.replace(generated=generated),
            decodes=np.array([*decodes, *[False] * padding], np.bool_),
            page_copies=None
            if copies is None
            else np.array([*copies, *[(-1, 0)] * padding], np.int32),
            masks=masks,
            wants_logprobs=by_row.wants_logprobs,
            images=images,
        )

    def _lane_values(self, lane: np.ndarray) -> _ByRow:
        """What the rows' lanes say; on the device already while the same rows go on decoding."""
        key = lane.tobytes()
        if self._by_row is None or self._by_row[0] != key:
            values = _ByRow(
                lane, jax.tree.map(lambda column: column[lane], self._sampling), self._wants[lane]
            )
            self._by_row = key, jax.device_put(values)
        return self._by_row[1]

    def _note_pages(self, row: Row) -> None:
        sequence = row.sequence
        known, pages = self._num_pages[sequence.lane], sequence.pages
        if known < len(pages):
            self._table[sequence.lane, known : len(pages)] = pages[known:]
            self._num_pages[sequence.lane] = len(pages)

    def _masks(self, plan: StepPlan) -> jax.Array | np.ndarray:
        constrained = [
            (number, row.sequence)
            for number, row in enumerate(plan.rows)
            if row.emits and row.sequence.constraint is not None
        ]
        if not constrained:
            return self._all_allowed(plan.num_rows)
        masks = np.full((plan.num_rows, self._words), 0xFFFFFFFF, np.uint32)
        for number, sequence in constrained:
            assert sequence.constraint is not None
            try:
                masks[number] = self._mask(sequence.constraint)
            except Exception as error:  # somebody else's code, in a step shared with others
                plan.broken.append((sequence, error))
        return masks

    def _mask(self, constraint: TokenConstraint) -> np.ndarray:
        mask = np.frombuffer(constraint.mask(), "<u4")
        if len(mask) < self._words:
            raise ValueError(f"a mask of {len(mask)} words, expected {self._words}")
        mask = mask[: self._words]
        if not mask[:-1].any() and not mask[-1] & self._last_word:
            raise ValueError("its mask allows no token")
        return mask

    def _all_allowed(self, rows: int) -> jax.Array:
        if rows not in self._anything:
            self._anything[rows] = jnp.full((rows, self._words), 0xFFFFFFFF, jnp.uint32)
        return self._anything[rows]

    def _images(self, plan: StepPlan) -> ImageInputs | None:
        """Features of the media tokens in the span of an image request, which goes alone."""
        row, vision = plan.rows[0], self._config.vision
        images = row.sequence.request.images
        if images is None or vision is None or row.decodes:
            return None
        tokens = row.sequence.tokens
        span = tokens[row.start : row.start + row.length].count(vision.media_token_id)
        if not span:
            return None
        first = tokens[: row.start].count(vision.media_token_id)
        # On the host: a cut or padding of its own size would compile with every new image.
        features = np.zeros((plan.width, self._config.hidden_size), np.float32)
        if self._media_embedding is not None:
            features[:] = self._media_embedding
        taken = np.asarray(images.features)[first : first + span]
        features[: len(taken)] = taken
        return ImageInputs(features, np.zeros(plan.num_rows, np.int32))
