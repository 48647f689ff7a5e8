"""The search for what can go wrong between the programs of protocol.py: every interleaving of their actions and stores.

Since every read is checked, what a program stores and keeps next is known beforehand, and a state is only: how far each
program is, which of its stores have landed, what lies in memory.

`explore` visits all states, and stops at the first violation: a read that finds another chunk, or programs of which
none can go on. It skips interleavings that cannot matter: a move that commutes with every move which could still come
before it is made at once, and alone (a persistent set of one, in the words of partial order reduction). Such are
issuing a store; a wait for, or a post to, a signal with one writer, since that only grows; a join; a read, when nothing
else is to land in its slot; a landing, when nothing else is to land there and all reads to come wait for a post behind
it. No state occurs twice on a path, so nothing is put off for ever. `reduce=False` tries all but the first.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction

from tests.kernels.protocol import Chunk, Join, Launch, Post, Program, Put, Read, Rules, Span, Wait, programs, promised


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
