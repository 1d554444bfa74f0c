"""Where the samples of a run lie in its payload segments, and which segments nobody needs any more.

What always holds: a segment is needed while it holds a sample that a record of the decision log refers to (or will, in
this run), that no later `put` of the same sample has replaced, and that wasn't released. An answer whose `SampleDone`
comes after the `Cancel` of its attempt is needed by nobody: the core ignores it, and doesn't release it either. A
needed sample is named by `of` or, if its place was forgotten, lies in the segment `forgotten_in`.
"""

from collections.abc import Iterable, Iterator

from areal_async.log.format import PayloadRef
from areal_async.messages import AnyRecord, Cancel, SampleDone, SampleId


class Places:
    """By sample and attempt. A place costs some hundred bytes; a forgotten one only its name."""

    def __init__(self) -> None:
        self._places: dict[SampleId, dict[int, PayloadRef]] = {}
        self._needed: dict[int, set[SampleId]] = {}  # by segment
        self._coming: set[tuple[SampleId, int]] = set()  # no record has told of them yet

    def add(self, sample: SampleId, attempt: int, ref: PayloadRef) -> None:
        """The newest arrays of a sample; older ones in other segments need not be kept for it."""
        self.find(sample, attempt, ref)
        self.need(sample, ref)
        self._coming.add((sample, attempt))

    def told(self, record: AnyRecord) -> None:
        """This record is appended."""
        match record:
            case SampleDone(sample=sample, attempt=attempt):
                self._coming.discard((sample, attempt))
            case Cancel(sample=sample, attempt=attempt) if (sample, attempt) in self._coming:
                ref = self.of(sample, attempt)
                if ref is not None:
                    self._needed[ref.segment].discard(sample)

    def find(self, sample: SampleId, attempt: int, ref: PayloadRef) -> None:
        """These are the arrays that `of` names from now on."""
        self._places.setdefault(sample, {})[attempt] = ref

    def need(self, sample: SampleId, ref: PayloadRef) -> None:
        """A record refers to these arrays, to none of this sample after them."""
        before = self._segment_of(sample)
        if before is not None:
            self._needed[before].discard(sample)
        self.open(ref.segment)
        self._needed[ref.segment].add(sample)

    def open(self, segment: int) -> None:
        """There is this segment."""
        self._needed.setdefault(segment, set())

    def of(self, sample: SampleId, attempt: int) -> PayloadRef | None:
        """None: there are none, or their place was forgotten."""
        return self._places.get(sample, {}).get(attempt)

    def forgotten_in(self, sample: SampleId) -> int | None:
        """The segment that has this sample, whose place was forgotten; None: it is known, or nowhere."""
        return None if sample in self._places else self._segment_of(sample)

    def found_again(self, sample: SampleId, attempt: int, ref: PayloadRef) -> None:
        """Seen in a segment: if that is needed for this sample, `of` names it again."""
        if sample in self._needed[ref.segment]:
            self.find(sample, attempt, ref)

    def forget(self, samples: Iterable[SampleId]) -> None:
        for sample in samples:
            self._places.pop(sample, None)

    def release(self, samples: Iterable[SampleId]) -> None:
        samples = tuple(samples)
        self.forget(samples)
        for needed in self._needed.values():
            needed.difference_update(samples)

    def drop_unneeded(self, writing: int) -> list[int]:
        """Segments that may be deleted, all but the one that is being written; what lies there isn't found any more."""
        numbers = [number for number, samples in self._needed.items() if not samples and number != writing]
        for number in numbers:
            del self._needed[number]
        if numbers:
            self._drop_places(set(numbers))
        return numbers

    def _segment_of(self, sample: SampleId) -> int | None:
        """There is at most one that is needed for it."""
        return next((number for number, samples in self._needed.items() if sample in samples), None)

    def _drop_places(self, numbers: set[int]) -> None:
        """Of attempts that were replaced, and of arrays that no record refers to."""
        for sample, attempt in list(self._all_in(numbers)):
            del self._places[sample][attempt]
            if not self._places[sample]:
                del self._places[sample]

    def _all_in(self, numbers: set[int]) -> Iterator[tuple[SampleId, int]]:
        for sample, attempts in self._places.items():
            for attempt, ref in attempts.items():
                if ref.segment in numbers:
                    yield sample, attempt
