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
from functools import cache

from numba import types

from rope_cpu._compile import SOURCES, Kernel, compiled, helper
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


@helper
def _thread(pool, i):
    return pool + 8 * (HEAD_WORDS + THREAD_WORDS * i)


@helper
def _waiting(words):
    """Tell whether a range has chunks that nobody took."""
    return (words >> 16) & 0xFFFF < words & 0xFFFF


@helper
def _wake(pool, me):
    """Wake two more threads of the team if they sleep; they wake four."""
    for i in range(2 * me + 1, least(2 * me + 3, load(pool + TEAM))):
        place = _thread(pool, i)
        if load(place + ASLEEP) and _waiting(load(place + RANGE)) and replace(place + ASLEEP, 1, 0):
            _release(load(place + LOCK))


@helper
def _take_part(pool, me, grace):
    """Work on chunks until all are taken: one's own from the front, then the others' from the back.

    What lies in another processor's cache is slow to get at, so the first and the last chunk of others are left to
    them, unless they do not come for them while this thread looks `grace` times.
    """
    _wake(pool, me)
    team, chunks, looks = load(pool + TEAM), load(pool + CHUNKS), 0
    for i in range(team):
        owner = (me + i) % team
        place = _thread(pool, owner) + RANGE
        while True:
            words = load(place)
            first, end = (words >> 16) & 0xFFFF, words & 0xFFFF
            if first >= end:
                break
            if i and (end - first == 1 or first == chunks * owner // team) and looks < grace:
                relax()
                looks += 1
            elif replace(place, words, words - 1 if i else words + 0x10000):
                # The number of the job is in the word: what belongs to it stays until the chunk is done.
                units, chunks = load(pool + UNITS), load(pool + CHUNKS)
                chunk = end - 1 if i else first
                call(load(pool + WORK), (load(pool + JOB), units * chunk // chunks, units * (chunk + 1) // chunks))
                add(pool + DONE, 1)


if sys.platform == "linux":
    _processor = types.ExternalFunction("sched_getcpu", types.int32())
    _allowed = types.ExternalFunction("sched_getaffinity", types.int32(types.int32, types.uint64, types.int64))
    _allow = types.ExternalFunction("sched_setaffinity", types.int32(types.int32, types.uint64, types.int64))

    @helper
    def _elsewhere(pool):
        """Keep workers off the caller's processor, where the system may queue a thread that the caller wakes up.

        Returns whether the caller may use any other.
        """
        here = _processor()
        if load(pool + AWAY) == here + 1:
            return True
        if here < 0 or here >= 1024 or _allowed(0, 128, pool + MASK) < 0:
            return True
        word = pool + MASK + here // 64 * 8
        exchange(word, load(word) & ~(1 << here % 64))
        rest = 0
        for i in range(16):
            rest |= load(pool + MASK + 8 * i)
        if not rest:
            return False
        for i in range(1, load(pool + SIZE)):
            _allow(types.int32(load(_thread(pool, i) + NATIVE)), 128, pool + MASK)
        exchange(pool + AWAY, here + 1)
        return True

else:

    @helper
    def _elsewhere(pool):
        return True


@helper
def _had_better_be_serial(pool):
    """Tell whether a small job should let workers be: they sleep, or came late for the ones before."""
    asleep = load(_thread(pool, 1) + ASLEEP)
    if load(pool + WOKEN):
        exchange(pool + WOKEN, 0)
        if asleep:
            exchange(pool + CHANCES, 0)
            exchange(pool + IN_VAIN, least(load(pool + IN_VAIN) + 1, _MOST_IN_VAIN))
    if not asleep and load(pool + CHANCES):
        return (add(pool + SHARED, 1) + 1) % _ALONE == 0
    if add(pool + PASSED, 1) + 1 < _PATIENCE << load(pool + IN_VAIN):
        return True
    exchange(pool + PASSED, 0)
    exchange(pool + CHANCES, _CHANCES)
    exchange(pool + WOKEN, asleep)
    return False


@helper
def _remember(pool, kind, taken):
    """Keep what a small job took that its caller did alone, or little more than it took before, if it was that job."""
    before = load(pool + TAKEN)
    exchange(pool + TAKEN, least(taken, before + before // 8) if load(pool + KIND) == kind else taken)
    exchange(pool + KIND, kind)


@helper
def _judge(pool, taken):
    """Weigh whether a small job that was shared took longer than its caller alone takes."""
    if taken <= load(pool + TAKEN):
        if add(pool + CHANCES, 1) >= _MOST_CHANCES:
            exchange(pool + CHANCES, _MOST_CHANCES)
            exchange(pool + IN_VAIN, 0)
    elif add(pool + CHANCES, -1) == 1:
        exchange(pool + IN_VAIN, least(load(pool + IN_VAIN) + 1, _MOST_IN_VAIN))


@cache
def sharing() -> Kernel:
    """Return the kernel (pool, work, job, units, most) that `share` calls."""
    sources = SOURCES

    def share_out(pool, work, job, units, most):
        _ = sources  # a part of the cache key
        if load(pool + THREADS) < 2 or not replace(pool + BUSY, 0, 1):
            return call(work, (job, 0, units))
        small, kind = most < _SMALL, work + (units << 8) + most
        if (small and _had_better_be_serial(pool)) or not _elsewhere(pool):
            exchange(pool + BUSY, 0)
            begin = ticks()
            call(work, (job, 0, units))
            if small:
                _remember(pool, kind, ticks() - begin)
            return 0
        begin = ticks()
        team = least(least(load(pool + THREADS), units), most)
        chunks = least(units, _CHUNKS * team)
        number = (load(pool + NUMBER) + 1) & 0x7FFFFFFF
        exchange(pool + WORK, work)
        exchange(pool + JOB, job)
        exchange(pool + UNITS, units)
        exchange(pool + CHUNKS, chunks)
        exchange(pool + TEAM, team)
        exchange(pool + NUMBER, number)
        exchange(pool + DONE, 0)
        for i in range(team):
            exchange(_thread(pool, i) + RANGE, number << 32 | (chunks * i // team) << 16 | chunks * (i + 1) // team)
        looks = load(pool + LOOKS)
        _take_part(pool, types.int64(0), least(looks // _GRACE, looks * most // _GRACE_A_THREAD))
        while load(pool + DONE) < chunks:
            relax()
        # Those that were just woken are late in any case.
        if small and load(pool + KIND) == kind and not load(pool + WOKEN):
            _judge(pool, ticks() - begin)
        exchange(pool + BUSY, 0)
        return 0

    return compiled(share_out, "share", (types.int64,) * 5)


@cache
def serving() -> Kernel:
    """Return the kernel (pool, me) that a worker runs for ever, and the caller, 0, until it found nothing to do."""
    sources = SOURCES

    def serve(pool, me):
        _ = sources  # a part of the cache key
        place, most = _thread(pool, me), load(pool + LOOKS)
        while True:
            _take_part(pool, me, most // _GRACE)
            looks = 0
            while looks < most and not _waiting(load(place + RANGE)):
                relax()
                looks += 1
            if me == 0:
                return
            if looks == most:
                exchange(place + ASLEEP, 1)
                # A job that came in between has not seen that this thread sleeps; or it has, and releases the lock.
                if not _waiting(load(place + RANGE)) or not replace(place + ASLEEP, 1, 0):
                    _acquire(load(place + LOCK), 1)

    return compiled(serve, "serve", (types.int64,) * 2)


@helper
def share(pool, work, job, units, most):
    """Call work(job, start, stop) for parts of `units` on up to `most` threads of a pool; on this one alone for 0."""
    if pool == 0 or least(units, most) < 2:
        call(work, (job, 0, units))
    else:
        call(load(pool + SHARE), (pool, work, job, units, most))
