"""Compiled code that shares a kernel's work between threads and waits for no thread to turn up.

The caller works too. Each thread takes chunks from the front of a range of its own and then from the back of the
others'; where no worker turns up, because every processor is busy or wakes up slowly, the caller does all of it, in the
time a serial kernel takes. It waits at the end for chunks that are being worked on, even where a worker loses its
processor within one, but for no thread that has taken none. OpenMP's teams wait for all their threads, milliseconds on
a busy machine, and do not survive a fork.

Between jobs workers look out for the next one for some microseconds, then sleep on a lock of CPython's, which exists on
every platform and needs no GIL.

A pool is one block of int64 words. Words 0 to 47 are the job's; then each thread has 16 of its own.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import sys
from functools import cache, reduce
from operator import or_

from numba import types

from rope_cpu._compile import SOURCES, Kernel, compiled, helper
from rope_cpu._integers import choose, emitted, smaller
from rope_cpu._words import add, call, exchange, least, load, relax, replace, ticks

# Words of a pool, as byte offsets. BUSY: a job is under way. WORK, JOB, UNITS: what is called, with what, and how many
# units of work there are. CHUNKS: into how many parts these are cut. DONE: how many parts are finished. THREADS: how
# many may share a job. TEAM: how many share this one. NUMBER: of the job. AWAY: 1 + the processor that workers are kept
# off. SHARE: where `sharing` is. LOOKS: how often an idle worker looks for a job before it sleeps. PASSED: how many
# small jobs let workers be since they were last tried. IN_VAIN: how often in succession they were tried in vain.
# CHANCES: how many more small jobs they may be late for until that is said of this time. WOKEN: whether the last small
# job that was shared woke them. SHARED: how many were shared. KIND, TAKEN: which small job was last done by its caller
# alone, and what it took by the processor's clock. MASK: a set of 1024 processors.
BUSY, WORK, JOB, UNITS, CHUNKS, THREADS, SIZE, TEAM, NUMBER, AWAY, DONE = (8 * i for i in range(11))
SHARE, LOOKS, PASSED, IN_VAIN, CHANCES, WOKEN, KIND, TAKEN, SHARED, MASK = (8 * i for i in (*range(16, 25), 32))
# Words of a thread. RANGE: number of the job << 32 | first chunk << 16 | end. ASLEEP: whether its LOCK must be
# released. LOCK: the address of that. NATIVE: the system's number of the thread.
RANGE, ASLEEP, LOCK, NATIVE = 0, 64, 72, 80
HEAD_WORDS, THREAD_WORDS = 48, 16

# Chunks a thread starts with: enough that one which started late or was interrupted leaves little to wait for. Eight
# took 5 % longer than four at 512 tokens.
_CHUNKS = 4
# A job for fewer threads than this is small: it takes about as long as waking a worker. In quick succession small jobs
# find workers awake, once one has woken them; by themselves they had better be serial. So had all small jobs where
# processors are so far apart that workers come late. So one in so many small jobs tries workers, and wakes them. Where
# the next finds them asleep again, or they were late for so many more than they were in time for, that was in vain, and
# they are tried again after twice as many, up to 2^7 times as many. Being in time makes up for at most so many. Late is
# what takes longer than the same job did when it was last done by its caller alone, as one in so many always is.
_SMALL, _PATIENCE, _CHANCES, _MOST_CHANCES, _MOST_IN_VAIN, _ALONE = 9, 8, 8, 16, 7, 64
# How long a worker looks for a job before it sleeps, in seconds. A look takes 5 to 50 ns, by the processor, so how many
# these are is measured when a pool is started. In parts of it: how long a thread that has nothing left to do waits for
# others to come for their first or last chunk, 5 µs; the caller of a small job 0.5 µs for each thread that it is worth.
IDLE_SECONDS = 50e-6
_GRACE, _GRACE_A_THREAD = 10, 100

_acquire = types.ExternalFunction("PyThread_acquire_lock", types.int32(types.int64, types.int32))
_release = types.ExternalFunction("PyThread_release_lock", types.void(types.int64))


def _place(pool, i):
    return pool + 8 * (HEAD_WORDS + THREAD_WORDS * i)


@emitted(types.int64)
def _thread(pool, i):
    """Return where the words of a thread are."""
    return _place(pool, i)


def _first_end(words):
    """Return the first chunk of a range that nobody took, and the end of them."""
    return (words >> 16) & 0xFFFF, words & 0xFFFF


@emitted(types.boolean)
def _waiting(words):
    """Tell whether a range has chunks that nobody took."""
    first, end = _first_end(words)
    return first < end


@helper
def _wake(pool, me):
    """Wake two more threads of the team if they sleep; they wake four."""
    for i in range(2 * me + 1, least(2 * me + 3, load(pool, TEAM))):
        place = _thread(pool, i)
        if load(place, ASLEEP) and _waiting(load(place, RANGE)) and replace(place, ASLEEP, 1, 0):
            _release(load(place, LOCK))


@emitted(types.Tuple((types.boolean, types.int64)))
def _taking(pool, words, owner, team, is_own):
    """Return whether the next chunk of a range is left to its owner at first, and the range without that chunk.

    What lies in another processor's cache is slow to get at, so others leave an owner its first and its last.
    """
    first, end = _first_end(words)
    left = (end - first == 1) | (first == (pool + CHUNKS).load() * owner // team)
    return left & ~is_own, choose(is_own, words + 0x10000, words - 1)


@emitted(types.UniTuple(types.int64, 3))
def _chunk(pool, words, is_own):
    """Return the job, and the range of its units that the chunk is which was taken from a range."""
    first, end = _first_end(words)
    units, chunks, chunk = (pool + UNITS).load(), (pool + CHUNKS).load(), choose(is_own, first, end - 1)
    return (pool + JOB).load(), units * chunk // chunks, units * (chunk + 1) // chunks


@helper
def _take_part(pool, me, grace):
    """Work on chunks until all are taken: one's own from the front, then the others' from the back.

    Those that are left to others are taken if they do not come for them while this thread looks `grace` times.
    """
    _wake(pool, me)
    team, looks = load(pool, TEAM), 0
    for i in range(team):
        owner, is_own = (me + i) % team, i == 0
        place = _thread(pool, owner)
        while True:
            words = load(place, RANGE)
            if not _waiting(words):
                break
            left, taken = _taking(pool, words, owner, team, is_own)
            if left and looks < grace:
                relax()
                looks += 1
            elif replace(place, RANGE, words, taken):
                # The number of the job is in the word: what belongs to it stays until the chunk is done.
                call(load(pool, WORK), _chunk(pool, words, is_own))
                add(pool, DONE, 1)


if sys.platform == "linux":
    _processor = types.ExternalFunction("sched_getcpu", types.int32())
    _allowed = types.ExternalFunction("sched_getaffinity", types.int32(types.int32, types.uint64, types.int64))
    _allow = types.ExternalFunction("sched_setaffinity", types.int32(types.int32, types.uint64, types.int64))

    @emitted(types.boolean)
    def _leave_out(pool, processor):
        """Take a processor out of the set; tell whether any is left."""
        words = [pool + MASK + 8 * i for i in range(16)]
        own = words[0] + (processor >> 6) * 8
        own.exchange(own.load() & ~(1 << (processor & 63)))
        return reduce(or_, [word.load() for word in words]) != 0

    @helper
    def _elsewhere(pool):
        """Keep workers off the caller's processor, where the system may queue a thread that the caller wakes up.

        Returns whether the caller may use any other.
        """
        here = types.int64(_processor())
        if load(pool, AWAY) == here + 1:
            return True
        if here < 0 or here >= 1024 or _allowed(0, 128, pool + MASK) < 0:
            return True
        if not _leave_out(pool, here):
            return False
        for i in range(1, load(pool, SIZE)):
            _allow(types.int32(load(_thread(pool, i), NATIVE)), 128, pool + MASK)
        exchange(pool, AWAY, here + 1)
        return True

else:

    @helper
    def _elsewhere(pool):
        return True


@emitted(types.int64)
def _in_vain(pool):
    """Note that small jobs were shared in vain once more."""
    count = pool + IN_VAIN
    return count.exchange(smaller(count.load() + 1, _MOST_IN_VAIN))


@helper
def _had_better_be_serial(pool):
    """Tell whether a small job should let workers be: they sleep, or came late for the ones before."""
    asleep = load(_thread(pool, 1), ASLEEP)
    if load(pool, WOKEN):
        exchange(pool, WOKEN, 0)
        if asleep:
            exchange(pool, CHANCES, 0)
            _in_vain(pool)
    if not asleep and load(pool, CHANCES):
        return (add(pool, SHARED, 1) + 1) % _ALONE == 0
    if add(pool, PASSED, 1) + 1 < _PATIENCE << load(pool, IN_VAIN):
        return True
    exchange(pool, PASSED, 0)
    exchange(pool, CHANCES, _CHANCES)
    exchange(pool, WOKEN, asleep)
    return False


@emitted(types.int64)
def _remember(pool, kind, taken):
    """Keep what a small job took that its caller did alone, or little more than it took before, if it was that job."""
    known, before = (pool + KIND).exchange(kind) == kind, (pool + TAKEN).load()
    return (pool + TAKEN).exchange(choose(known, smaller(taken, before + before // 8), taken))


@helper
def _judge(pool, taken):
    """Weigh whether a small job that was shared took longer than its caller alone takes."""
    if taken <= load(pool, TAKEN):
        if add(pool, CHANCES, 1) >= _MOST_CHANCES:
            exchange(pool, CHANCES, _MOST_CHANCES)
            exchange(pool, IN_VAIN, 0)
    elif add(pool, CHANCES, -1) == 1:
        _in_vain(pool)


@emitted(types.UniTuple(types.int64, 3))
def _announce(pool, work, job, units, most):
    """Write down a job; return its team, how many chunks it is cut into, and its number."""
    team = smaller(smaller((pool + THREADS).load(), units), most)
    chunks, number = smaller(units, _CHUNKS * team), ((pool + NUMBER).load() + 1) & 0x7FFFFFFF
    words = {WORK: work, JOB: job, UNITS: units, CHUNKS: chunks, TEAM: team, NUMBER: number, DONE: 0}
    for place, word in words.items():
        (pool + place).exchange(word)
    return team, chunks, number


@emitted(types.int64)
def _give_range(pool, i, team, chunks, number):
    """Tell a thread which chunks it starts with."""
    words = (number << 32) | ((chunks * i // team) << 16) | (chunks * (i + 1) // team)
    return (_place(pool, i) + RANGE).exchange(words)


@cache
def sharing() -> Kernel:
    """Return the kernel (pool, work, job, units, most) that `share` calls."""
    sources = SOURCES

    def share_out(pool, work, job, units, most):
        _ = sources  # a part of the cache key
        if load(pool, THREADS) < 2 or not replace(pool, BUSY, 0, 1):
            return call(work, (job, 0, units))
        small, kind = most < _SMALL, work + (units << 8) + most
        if (small and _had_better_be_serial(pool)) or not _elsewhere(pool):
            exchange(pool, BUSY, 0)
            begin = ticks()
            call(work, (job, 0, units))
            if small:
                _remember(pool, kind, ticks() - begin)
            return 0
        begin = ticks()
        team, chunks, number = _announce(pool, work, job, units, most)
        for i in range(team):
            _give_range(pool, i, team, chunks, number)
        looks = load(pool, LOOKS)
        _take_part(pool, types.int64(0), least(looks // _GRACE, looks * most // _GRACE_A_THREAD))
        while load(pool, DONE) < chunks:
            relax()
        # Those that were just woken are late in any case.
        if small and load(pool, KIND) == kind and not load(pool, WOKEN):
            _judge(pool, ticks() - begin)
        exchange(pool, BUSY, 0)
        return 0

    return compiled(share_out, "share", (types.int64,) * 5)


@cache
def serving() -> Kernel:
    """Return the kernel (pool, me) that a worker runs for ever, and the caller, 0, until it found nothing to do."""
    sources = SOURCES

    def serve(pool, me):
        _ = sources  # a part of the cache key
        place, most = _thread(pool, me), load(pool, LOOKS)
        while True:
            _take_part(pool, me, most // _GRACE)
            looks = 0
            while looks < most and not _waiting(load(place, RANGE)):
                relax()
                looks += 1
            if me == 0:
                return
            if looks == most:
                exchange(place, ASLEEP, 1)
                # A job that came in between has not seen that this thread sleeps; or it has, and releases the lock.
                if not _waiting(load(place, RANGE)) or not replace(place, ASLEEP, 1, 0):
                    _acquire(load(place, LOCK), 1)

    return compiled(serve, "serve", (types.int64,) * 2)


@helper
def share(pool, work, job, units, most):
    """Call work(job, start, stop) for parts of `units` on up to `most` threads of a pool; on this one alone for 0."""
    if pool == 0 or least(units, most) < 2:
        call(work, (job, 0, units))
    else:
        call(load(pool, SHARE), (pool, work, job, units, most))
