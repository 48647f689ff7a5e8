"""The protocol of the kernels, small enough to try every interleaving of it.

A *program* is what one channel of one rank does in a few launches (epochs) that follow each other: no branches, only
these actions, in the order in which kernels/ring.py and kernels/direct.py have them:

    wait   for a signal to reach a number; possible only when it has
    read   a slot of its own, and find in it the chunk of this epoch that the plan says, with the right contributors
    join   the other channels of the rank: the next launch begins when all have finished this one
    store  a chunk into a peer's slot (put), or the epoch into a peer's signal (post)

Stores do not happen when they are issued: each *lands* at any later moment. A chunk may overtake everything of its
rank but a chunk for the same memory, even the signals before it; a post, being a release, lands after everything that
its program issued before, and after all that its rank stored in earlier launches. That allows more than the hardware
does. A signal holds what landed last, also if that is less.

Instead of numbers, slots hold where chunks come from: epoch, segment, chunk, contributors. Since every read is
checked, what a program stores and keeps next is known beforehand, and a state is only: how far each program is, which
of its stores have landed, what lies in memory. Memory is modelled by address, as the algorithms cut one set of slots
into rows of different sizes: a slot of one overlaps several of another. Every launch fills its rows.

`explore` visits all states, and stops at the first violation: a read that finds another chunk, or programs of which
none can go on. It skips interleavings that cannot matter: a move that commutes with every move which could still come
before it is made at once, and alone (a persistent set of one, in the words of partial order reduction). Such are
issuing a store; a wait for, or a post to, a signal with one writer, since that only grows; a join; a read, when nothing
else is to land in its slot; a landing, when nothing else is to land there and all reads to come wait for a post behind
it. No state occurs twice on a path, so nothing is put off for ever. `reduce=False` tries all but the first.

Left out: time (a wait that expires, abort, NaN) and the wrap of epochs at 2^31.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from fractions import Fraction

from fusedring.config import Algorithm, Kind


@dataclass(frozen=True)
class Launch:
    """One launch. chunks: how many of the chunks of each part (see plan.py) hold anything."""

    algorithm: Algorithm
    chunks: tuple[int, ...]
    kind: Kind = "all_reduce"


@dataclass(frozen=True)
class Rules:
    """The rules of the protocol. Each can be broken, to see that it is needed.

    parity: epochs use two sets of slots in turn. release: a post lands after the chunks before it. compare_epochs: a
    wait is for this epoch, not for any. post_empty, await_empty: also where there is nothing to carry. separate_rows:
    ring and direct algorithms have their own rows of signals. stream_order: a rank's channels join between launches.
    no_wait: the wait that is left out: rank, and which.
    """

    parity: bool = True
    release: bool = True
    compare_epochs: bool = True
    post_empty: bool = True
    await_empty: bool = True
    separate_rows: bool = True
    stream_order: bool = True
    no_wait: tuple[int, int] | None = None


Signal = tuple[int, int, int]
"""Rank in whose memory it is, row, index in the row."""

Span = tuple[int, Fraction, Fraction]
"""Rank in whose memory it is, first address, last; a set of slots has length 1."""


@dataclass(frozen=True)
class Chunk:
    """A chunk on its trip, and the ranks whose contributions it has."""

    epoch: int
    segment: int
    chunk: int
    contributors: frozenset[int]

    def __str__(self) -> str:
        letters = "+".join("abcdefgh"[r] for r in sorted(self.contributors))
        return f"chunk {self.chunk} of segment {self.segment} ({letters}) of epoch {self.epoch}"


@dataclass(frozen=True)
class Wait:
    signal: Signal
    epoch: int


@dataclass(frozen=True)
class Read:
    span: Span
    expected: Chunk


@dataclass(frozen=True)
class Join:
    """All channels of the rank have finished the epochs before this one."""

    epoch: int


@dataclass(frozen=True)
class Put:
    span: Span
    chunk: Chunk


@dataclass(frozen=True)
class Post:
    signal: Signal
    epoch: int


@dataclass
class Program:
    """What one channel of one rank does.

    actions: its waits, reads and joins. stores: its puts and posts, each with the number of actions that come before.
    kept: for each epoch, contributors by part and chunk. waits: how many waits it has, with those left out.
    """

    rank: int
    world: int
    channel: int
    channels: int
    rules: Rules
    actions: list[Wait | Read | Join] = field(default_factory=list)
    stores: list[tuple[int, Put | Post]] = field(default_factory=list)
    kept: list[dict[tuple[int, int], frozenset[int]]] = field(default_factory=list)
    waits: int = 0

    @property
    def epoch(self) -> int:
        return len(self.kept)

    def add(self, launch: Launch) -> None:
        """Append the actions of the next epoch."""
        assert len(launch.chunks) == self.world > 1
        self.kept.append({})
        if self.channels > 1 and self.epoch > 1 and self.rules.stream_order:
            self.actions.append(Join(self.epoch))
        (self._ring if launch.algorithm == "ring" else self._direct)(launch)

    def _wait(self, row: int, index: int, empty: bool) -> None:
        if empty and not self.rules.await_empty:
            return
        if self.rules.no_wait != (self.rank, self.waits):
            self.actions.append(Wait((self.rank, row, index), self.epoch if self.rules.compare_epochs else 1))
        self.waits += 1

    def _post(self, rank: int, row: int, index: int, empty: bool) -> None:
        if not empty or self.rules.post_empty:
            self.stores.append((len(self.actions), Post((rank, row, index), self.epoch)))

    def _read(self, slot: tuple[Fraction, Fraction], expected: Chunk) -> None:
        self.actions.append(Read((self.rank, *self._in_parity(slot)), expected))

    def _put(self, rank: int, slot: tuple[Fraction, Fraction], chunk: Chunk) -> None:
        self.stores.append((len(self.actions), Put((rank, *self._in_parity(slot)), chunk)))

    def _in_parity(self, slot: tuple[Fraction, Fraction]) -> tuple[Fraction, Fraction]:
        base = self.epoch % 2 if self.rules.parity else 0
        return base + slot[0], base + slot[1]

    def _ring(self, launch: Launch) -> None:
        world, rank, hops = self.world, self.rank, self.world - 1
        scatter, gather = launch.kind != "all_gather", launch.kind != "reduce_scatter"
        chunks = max(1, *launch.chunks)

        def slot(row: int, chunk: int) -> tuple[Fraction, Fraction]:
            first = Fraction(row * chunks + chunk, 2 * hops * chunks)
            return first, first + Fraction(1, 2 * hops * chunks)

        def arriving(row: int, segment: int) -> frozenset[int]:
            """Contributors of what rank-1 sends in step `row`."""
            if row < hops:
                return frozenset((rank - 1 - hop) % world for hop in range(row + 1))
            return frozenset(range(world)) if scatter else frozenset([(segment - 1) % world])

        def step(segment: int, row_in: int | None, row_out: int | None, reduce: bool, copy: bool) -> None:
            part = (segment - 1) % world
            for chunk in range(self.channel, chunks, self.channels):
                empty = chunk >= launch.chunks[part]
                contributors: frozenset[int] = frozenset()
                if row_in is not None:
                    self._wait(row_in, chunk, empty)
                    contributors = arriving(row_in, segment)
                    if not empty:
                        self._read(slot(row_in, chunk), Chunk(self.epoch, segment, chunk, contributors))
                if reduce:
                    contributors |= {rank}
                following = (rank + 1) % world
                if row_out is not None and not empty:
                    self._put(following, slot(row_out, chunk), Chunk(self.epoch, segment, chunk, contributors))
                if copy and not empty:
                    self.kept[-1][part, chunk] = contributors
                if row_out is not None:
                    self._post(following, row_out, chunk, empty)

        complete = (rank + 1) % world
        if scatter:
            step(rank, None, 0, True, False)
            for hop in range(1, hops):
                step((rank - hop) % world, hop - 1, hop, True, False)
            step(complete, hops - 1, hops if gather else None, True, True)
        else:
            step(complete, None, hops, True, True)
        if gather:
            for hop in range(1, hops):
                step((complete - hop) % world, hops + hop - 1, hops + hop, False, True)
            step((rank + 2) % world, 2 * hops - 1, None, False, True)

    def _direct(self, launch: Launch) -> None:
        world, rank = self.world, self.rank
        scatter, gather = launch.kind != "all_gather", launch.kind != "reduce_scatter"
        everyone_sums = launch.algorithm == "one_shot" and scatter and gather
        one_sums = launch.algorithm == "master"
        chunks = max(1, *launch.chunks)
        rows = world if everyone_sums else world + 1 if one_sums else 2 * world
        places = world * chunks if everyone_sums or one_sums else chunks
        first_signals = 2 * world if self.rules.separate_rows else 0

        def slot(row: int, segment: int, chunk: int) -> tuple[Fraction, Fraction]:
            place = segment * chunks + chunk if everyone_sums or one_sums else chunk
            first = Fraction(row * places + place, rows * places)
            return first, first + Fraction(1, rows * places)

        def each_chunk(segment: int) -> Iterator[tuple[int, int, bool]]:
            for chunk in range(self.channel, chunks, self.channels):
                yield chunk, segment * chunks + chunk, chunk >= launch.chunks[segment]

        def hand_to(receivers: list[int], row: int, contributors: frozenset[int], segment: int, chunk: int) -> None:
            for receiver in receivers:
                self._put(receiver, slot(row, segment, chunk), Chunk(self.epoch, segment, chunk, contributors))

        def send(segment: int, receivers: list[int]) -> None:
            for chunk, index, empty in each_chunk(segment):
                if not empty:
                    hand_to(receivers, rank, frozenset([rank]), segment, chunk)
                for receiver in receivers:
                    self._post(receiver, first_signals + rank, index, empty)

        def add_up(segment: int, senders: list[int], receivers: list[int]) -> None:
            for chunk, index, empty in each_chunk(segment):
                for sender in senders:
                    if sender != rank:
                        self._wait(first_signals + sender, index, empty)
                if not empty:
                    for sender in senders:
                        if sender != rank:
                            expected = Chunk(self.epoch, segment, chunk, frozenset([sender]))
                            self._read(slot(sender, segment, chunk), expected)
                    hand_to(receivers, world + rank, frozenset(senders), segment, chunk)
                    self.kept[-1][segment, chunk] = frozenset(senders)
                for receiver in receivers:
                    self._post(receiver, first_signals + world + rank, index, empty)

        def receive(segment: int, reducer: int, contributors: frozenset[int]) -> None:
            for chunk, index, empty in each_chunk(segment):
                self._wait(first_signals + world + reducer, index, empty)
                if not empty:
                    expected = Chunk(self.epoch, segment, chunk, contributors)
                    self._read(slot(world + reducer, segment, chunk), expected)
                    self.kept[-1][segment, chunk] = contributors

        others = [r for r in range(world) if r != rank]
        from_next = [(rank + hop) % world for hop in range(1, world + 1)]
        for segment in from_next:
            reducer = 0 if one_sums else segment
            if everyone_sums:
                send(segment, others)
            elif reducer != rank and (scatter or segment == rank):
                send(segment, [reducer])
        for segment in range(world):
            senders = list(range(world)) if scatter else [segment]
            if everyone_sums:
                add_up(segment, senders, [])
            elif (0 if one_sums else segment) == rank:
                add_up(segment, senders, others if gather else [r for r in others if r == segment])
        if not everyone_sums:
            for segment in from_next:
                reducer = 0 if one_sums else segment
                if reducer != rank and (gather or segment == rank):
                    receive(segment, reducer, frozenset(range(world)) if scatter else frozenset([segment]))


def programs(launches: tuple[Launch, ...], rules: Rules, channels: int = 1) -> list[Program]:
    """The programs of every rank."""
    world = len(launches[0].chunks)
    result = [Program(rank, world, channel, channels, rules) for rank in range(world) for channel in range(channels)]
    for program in result:
        for launch in launches:
            program.add(launch)
    return result


def promised(launch: Launch, rank: int) -> dict[tuple[int, int], frozenset[int]]:
    """What a rank must have kept after a launch: contributors by part and chunk."""
    parts = range(len(launch.chunks)) if launch.kind != "reduce_scatter" else [rank]
    everybody = frozenset(range(len(launch.chunks)))
    return {
        (part, chunk): frozenset([part]) if launch.kind == "all_gather" else everybody
        for part in parts
        for chunk in range(launch.chunks[part])
    }


@dataclass(frozen=True)
class Result:
    """states: how many were visited. violation: what went wrong, if anything. trace: the moves that led there."""

    states: int
    violation: str | None = None
    trace: tuple[str, ...] = ()


State = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""Actions done by each program, bits of its landed stores, which chunk lies in each cell of memory, signals."""

Move = tuple[int, int]
"""A program, and which of its stores lands (-1: none, it does its next action)."""

Bits = list[tuple[int, int]]
"""Some stores: programs, and a bit for each of their stores."""


def explore(
    launches: tuple[Launch, ...], rules: Rules | None = None, *, channels: int = 1, reduce: bool = True
) -> Result:
    """Visit all states that `launches`, one after another, can get into."""
    model = _Model(programs(launches, rules or Rules(), channels), reduce)
    start = model.start()
    came_from: dict[State, tuple[State, Move] | None] = {start: None}
    queue = deque([start])

    def violation(what: str, state: State, last: str | None) -> Result:
        moves = [] if last is None else [last]
        while (step := came_from[state]) is not None:
            state, move = step
            moves.append(model.describe(move, state))
        return Result(len(came_from), what, tuple(reversed(moves)))

    for rank in range(len(launches[0].chunks)):
        for epoch, launch in enumerate(launches, 1):
            if not promised(launch, rank).items() <= model.kept(rank, epoch).items():
                return violation(f"rank {rank} keeps less than promised in epoch {epoch}", start, None)
    while queue:
        state = queue.popleft()
        moves = model.moves(state)
        if not moves and not model.finished(state):
            return violation("deadlock", state, None)
        for move in moves:
            if (found := model.wrong(move, state)) is not None:
                return violation(found, state, model.describe(move, state))
            following = model.after(move, state)
            if following not in came_from:
                came_from[following] = (state, move)
                queue.append(following)
    return Result(len(came_from))


class _Model:
    """Programs, with all that can be known before the search: cells of memory, and who conflicts with whom."""

    def __init__(self, programs: list[Program], reduce: bool) -> None:
        self._programs = programs
        self._reduce = reduce
        self._rules = programs[0].rules
        self._ranks = [program.rank for program in programs]
        self._actions = [program.actions for program in programs]
        self._stores = [[store for _, store in program.stores] for program in programs]
        self._issued = [
            [sum(before <= done for before, _ in program.stores) for done in range(len(program.actions) + 1)]
            for program in programs
        ]
        self._puts = [(p, n, x) for p, n, x in self._all_stores() if isinstance(x, Put)]
        self._posts = [(p, n, x) for p, n, x in self._all_stores() if isinstance(x, Post)]
        self._name_signals()
        self._name_cells()
        self._find_conflicts()

    def _all_stores(self) -> Iterator[tuple[int, int, Put | Post]]:
        for program, stores in enumerate(self._stores):
            for number, store in enumerate(stores):
                yield program, number, store

    def _name_signals(self) -> None:
        awaited = {x.signal for actions in self._actions for x in actions if isinstance(x, Wait)}
        self._word = {x: n for n, x in enumerate(sorted(awaited | {x.signal for _, _, x in self._posts}))}
        # The channels of one rank count as one writer where stream order keeps their posts in order.
        writers = {(x.signal, self._ranks[p] if self._rules.stream_order else p) for p, _, x in self._posts}
        count = Counter(signal for signal, _ in writers)
        self._grows = {signal: count[signal] <= 1 for signal in self._word}

    def _name_cells(self) -> None:
        """Cut memory so that a slot is a whole number of cells, and number the chunks from 1 (0 is zeroed memory)."""
        reads = [x for actions in self._actions for x in actions if isinstance(x, Read)]
        spans = {x.span for _, _, x in self._puts} | {x.span for x in reads}
        edges: dict[int, list[Fraction]] = {}
        offsets: dict[int, int] = {}
        self._memory = 0
        for rank in set(self._ranks):
            edges[rank] = sorted({edge for r, *ends in spans if r == rank for edge in ends})
            offsets[rank] = self._memory
            self._memory += len(edges[rank])
        self._cells = {
            (rank, first, last): range(
                offsets[rank] + bisect_left(edges[rank], first), offsets[rank] + bisect_left(edges[rank], last)
            )
            for rank, first, last in spans
        }
        chunks = {x.chunk for _, _, x in self._puts} | {x.expected for x in reads}
        self._chunks: list[Chunk | None] = [None, *sorted(chunks, key=str)]
        self._number = {chunk: number for number, chunk in enumerate(self._chunks)}

    def _find_conflicts(self) -> None:
        # Of each store: what must land before it, what else is to land in the same memory, and the reads there that
        # might come before it. Of each action: what is to land in the memory that it reads.
        self._before: dict[Move, Bits] = {(p, n): self._ordered_before(p, n, x) for p, n, x in self._all_stores()}
        self._rival_puts: dict[Move, Bits] = {}
        self._rival_reads: dict[Move, list[tuple[int, int]]] = {}
        reads = [(p, n, x) for p, xs in enumerate(self._actions) for n, x in enumerate(xs) if isinstance(x, Read)]
        for program, number, put in self._puts:
            same = self._puts_into(put.span)
            after = [(p, n) for p, n in same if _has(self._before[p, n], program, number)]
            before = [(p, n) for p, n in same if _has(self._before[program, number], p, n)]
            self._rival_puts[program, number] = _bits(set(same) - {*after, *before, (program, number)})
            self._rival_reads[program, number] = [
                (p, n)
                for p, n, read in reads
                if _overlap(read.span, put.span) and not self._waits_for(p, n, program, number)
            ]
        self._put_here = {(p, n): _bits(self._puts_into(read.span)) for p, n, read in reads}

    def _ordered_before(self, program: int, number: int, store: Put | Post) -> Bits:
        """The stores that must land before this one."""
        found = set()
        for p, n, other in self._all_stores():
            if p == program:
                earlier = n < number
            else:
                in_stream = self._rules.stream_order and self._ranks[p] == self._ranks[program]
                earlier = in_stream and _epoch(other) < _epoch(store)
            if not earlier:
                continue
            if isinstance(store, Put):
                ordered = isinstance(other, Put) and _overlap(other.span, store.span)
            else:
                ordered = self._rules.release or (isinstance(other, Post) and other.signal == store.signal)
            if ordered:
                found.add((p, n))
        return _bits(found)

    def _puts_into(self, span: Span) -> list[tuple[int, int]]:
        return [(p, n) for p, n, put in self._puts if _overlap(put.span, span)]

    def _waits_for(self, reader: int, read: int, program: int, number: int) -> bool:
        """Whether this read follows a wait for posts which all land after this store."""
        return any(
            all(
                _has(self._before[p, n], program, number)
                for p, n, post in self._posts
                if post.signal == action.signal and post.epoch >= action.epoch
            )
            for action in self._actions[reader][:read]
            if isinstance(action, Wait)
        )

    def kept(self, rank: int, epoch: int) -> dict[tuple[int, int], frozenset[int]]:
        """What a rank has kept after an epoch: contributors by part and chunk."""
        kept = {}
        for program in self._programs:
            if program.rank == rank:
                kept |= program.kept[epoch - 1]
        return kept

    def start(self) -> State:
        none = (0,) * len(self._programs)
        return none, none, (0,) * self._memory, (0,) * len(self._word)

    def finished(self, state: State) -> bool:
        return all(done == len(actions) for done, actions in zip(state[0], self._actions, strict=True))

    def moves(self, state: State) -> list[Move]:
        """All moves that are possible; or one, if it may be made at once."""
        done, landed = state[:2]
        possible: list[Move] = []
        for program, actions in enumerate(self._actions):
            outstanding = ((1 << self._issued[program][done[program]]) - 1) & ~landed[program]
            while outstanding:
                move = program, (outstanding & -outstanding).bit_length() - 1
                outstanding &= outstanding - 1
                if not _any_outstanding(self._before[move], landed):
                    if self._reduce and self._lands_at_once(move, state):
                        return [move]
                    possible.append(move)
            if done[program] < len(actions) and self._can_go_on(program, state):
                if self._reduce and self._goes_on_at_once(program, state):
                    return [(program, -1)]
                possible.append((program, -1))
        return possible

    def _can_go_on(self, program: int, state: State) -> bool:
        done = state[0]
        match self._actions[program][done[program]]:
            case Wait(signal, epoch):
                return state[3][self._word[signal]] >= epoch
            case Join() as join:
                return all(
                    self._actions[other].index(join) <= done[other]
                    for other, rank in enumerate(self._ranks)
                    if rank == self._ranks[program]
                )
            case _:
                return True

    def _goes_on_at_once(self, program: int, state: State) -> bool:
        done, landed = state[:2]
        match self._actions[program][done[program]]:
            case Wait(signal):
                return self._grows[signal]
            case Join():
                return True
            case _:
                return not _any_outstanding(self._put_here[program, done[program]], landed)

    def _lands_at_once(self, move: Move, state: State) -> bool:
        store = self._stores[move[0]][move[1]]
        if isinstance(store, Post):
            return self._grows[store.signal]
        done, landed = state[:2]
        return not _any_outstanding(self._rival_puts[move], landed) and not any(
            done[reader] <= read for reader, read in self._rival_reads[move]
        )

    def after(self, move: Move, state: State) -> State:
        program, number = move
        done, landed, memory, signals = state
        if number < 0:
            return (*done[:program], done[program] + 1, *done[program + 1 :]), landed, memory, signals
        landed = (*landed[:program], landed[program] | 1 << number, *landed[program + 1 :])
        store = self._stores[program][number]
        if isinstance(store, Post):
            at = self._word[store.signal]
            return done, landed, memory, (*signals[:at], store.epoch, *signals[at + 1 :])
        cells = self._cells[store.span]
        content = (self._number[store.chunk],) * len(cells)
        return done, landed, (*memory[: cells.start], *content, *memory[cells.stop :]), signals

    def wrong(self, move: Move, state: State) -> str | None:
        """What a read finds that it must not find."""
        program, number = move
        if number >= 0:
            return None
        action = self._actions[program][state[0][program]]
        if not isinstance(action, Read):
            return None
        expected = self._number[action.expected]
        for cell in self._cells[action.span]:
            if (found := state[2][cell]) != expected:
                return f"rank {self._ranks[program]} wants {action.expected}, finds {self._chunks[found] or 'nothing'}"
        return None

    def describe(self, move: Move, state: State) -> str:
        program, number = move
        rank = self._ranks[program]
        action = self._stores[program][number] if number >= 0 else self._actions[program][state[0][program]]
        match action:
            case Wait(signal, epoch):
                return f"rank {rank} sees that signal {signal[1:]} has reached {epoch}"
            case Read(_, expected):
                return f"rank {rank} reads {expected}"
            case Join(epoch):
                return f"rank {rank} begins epoch {epoch}"
            case Put(span, chunk):
                return f"rank {rank}'s {chunk} lands at rank {span[0]}"
            case Post(signal, epoch):
                return f"rank {rank}'s signal {signal[1:]} = {epoch} lands at rank {signal[0]}"


def _epoch(store: Put | Post) -> int:
    return store.epoch if isinstance(store, Post) else store.chunk.epoch


def _overlap(a: Span, b: Span) -> bool:
    return a[0] == b[0] and a[1] < b[2] and b[1] < a[2]


def _bits(stores: Iterable[tuple[int, int]]) -> Bits:
    bits: dict[int, int] = {}
    for program, number in stores:
        bits[program] = bits.get(program, 0) | 1 << number
    return list(bits.items())


def _has(stores: Bits, program: int, number: int) -> bool:
    return any(p == program and bits >> number & 1 for p, bits in stores)


def _any_outstanding(stores: Bits, landed: tuple[int, ...]) -> bool:
    return any(bits & ~landed[program] for program, bits in stores)
