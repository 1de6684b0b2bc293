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

from __future__ import annotations

import sys
from functools import cache, reduce
from operator import or_

from rope_cpu._kernels.compiler import DONE, Kernel, compiled
from rope_cpu._kernels.entry import whole
from rope_cpu._kernels.flow import Ending, Variable, each, repeat, when, whether
from rope_cpu._kernels.integers import Integer, choose, either, number, smaller
from rope_cpu._kernels.words import acquire, allow, allowed, call, processor, relax, release, ticks

# Words of a pool, as byte offsets. BUSY: a job is under way. WORK, JOB, UNITS: what is called, with what, and how many
# units of work there are. CHUNKS: into how many parts these are cut. FINISHED: how many parts are. SIZE: how many
# threads there are. THREADS: how many may share a job. TEAM: how many share this one. NUMBER: of the job. AWAY: 1 + the
# processor that workers are kept off. SHARE: where `sharing` is. LOOKS: how often an idle worker looks for a job before
# it sleeps. PASSED: how many small jobs let workers be since they were last tried. IN_VAIN: how often in succession
# they were tried in vain. CHANCES: how many more small jobs they may be late for until that is said of this time.
# WOKEN: whether the last small job that was shared woke them. SHARED: how many were shared. KIND, TAKEN: which small
# job was last done by its caller alone, and what it took by the processor's clock. MASK: a set of 1024 processors.
BUSY, WORK, JOB, UNITS, CHUNKS, THREADS, SIZE, TEAM, NUMBER, AWAY, FINISHED = (8 * i for i in range(11))
SHARE, LOOKS, PASSED, IN_VAIN, CHANCES, WOKEN, KIND, TAKEN, SHARED, MASK = (8 * i for i in (*range(16, 25), 32))
# Words of a thread. RANGE: number of the job << 32 | first chunk << 16 | end. ASLEEP: whether its LOCK must be
# released. LOCK: the address of that. NATIVE: the system's number of the thread.
RANGE, ASLEEP, LOCK, NATIVE = 0, 64, 72, 80
HEAD_WORDS, THREAD_WORDS = 48, 16

# Chunks a thread starts with: enough that one which started late or was interrupted leaves little to wait for. Eight
# took 5 % longer than four at 512 tokens.
_CHUNKS = 4
# Small jobs take about as long as waking a worker. In quick succession they find workers awake, once one has woken
# them; by themselves they had better be serial. So had all where processors are so far apart that workers come late. So
# some try workers, and wake them; where the next finds them asleep again, or they come late, that was in vain. Late is
# what takes longer than the same job did when its caller last did it alone.
_SMALL = 9  # threads: a job that is worth fewer is small
_PATIENCE = 8  # small jobs done alone before the next tries workers, doubled each time that is in vain
_MOST_IN_VAIN = 7  # so many times at most
_CHANCES = 8  # jobs that workers may be late for in a try; each that they are in time for adds one
_MOST_CHANCES = 16  # up to so many
_ALONE = 64  # one in so many small jobs is done alone, to be compared with
# How long a worker looks for a job before it sleeps, in seconds. A look takes 5 to 50 ns, by the processor, so how many
# these are is measured when a pool is started. In parts of it: how long a thread that has nothing left to do waits for
# others to come for their first or last chunk, 5 µs; the caller of a small job 0.5 µs for each thread that it is worth.
IDLE_SECONDS = 50e-6
_GRACE, _GRACE_A_THREAD = 10, 100


def _thread(pool: Integer, i: Integer | int) -> Integer:
    """Return where the words of a thread are."""
    return pool + 8 * HEAD_WORDS + i * (8 * THREAD_WORDS)


def _first_end(words: Integer) -> tuple[Integer, Integer]:
    """Return the first chunk of a range that nobody took, and the end of them."""
    return (words >> 16) & 0xFFFF, words & 0xFFFF


def _waiting(words: Integer) -> Integer:
    """Tell whether a range has chunks that nobody took."""
    first, end = _first_end(words)
    return first < end


def _wake(pool: Integer, me: Integer | int) -> None:
    """Wake two more threads of the team if they sleep; they wake four."""
    first = me * 2 + 1
    with each(first, smaller((pool + TEAM).load(), first + 2)) as i:
        place = _thread(pool, i)
        asleep = place + ASLEEP
        with when(asleep.load() != 0), when(_waiting((place + RANGE).load())), when(asleep.replace(1, 0)):
            release(pool.b, (place + LOCK).load())


def _taking(pool: Integer, words: Integer, owner: Integer, team: Integer, is_own: Integer) -> tuple[Integer, Integer]:
    """Return whether the next chunk of a range is left to its owner at first, and the range without that chunk.

    What lies in another processor's cache is slow to get at, so others leave an owner its first and its last.
    """
    first, end = _first_end(words)
    left = (end - first == 1) | (first == (pool + CHUNKS).load() * owner // team)
    return left & ~is_own, choose(is_own, words + 0x10000, words - 1)


def _chunk(pool: Integer, words: Integer, is_own: Integer) -> tuple[Integer, Integer, Integer]:
    """Return the job, and the range of its units that the chunk is which was taken from a range."""
    first, end = _first_end(words)
    units, chunks, chunk = (pool + UNITS).load(), (pool + CHUNKS).load(), choose(is_own, first, end - 1)
    return (pool + JOB).load(), units * chunk // chunks, units * (chunk + 1) // chunks


def _take_part(pool: Integer, me: Integer | int, grace: Integer) -> None:
    """Work on chunks until all are taken: one's own from the front, then the others' from the back.

    Those that are left to others are taken if they do not come for them while this thread looks `grace` times.
    """
    _wake(pool, me)
    b, team, looks = pool.b, (pool + TEAM).load(), Variable(pool.b, 0)
    with each(0, team) as i, repeat(b) as end_if:
        owner, is_own = (me + i) % team, i == 0
        ours = _thread(pool, owner) + RANGE
        words = ours.load()
        end_if(~_waiting(words))
        left, taken = _taking(pool, words, owner, team, is_own)
        with whether(left & (looks.now < grace)) as (wait, take):
            with wait:
                relax(b)
                looks.set(looks.now + 1)
            with take, when(ours.replace(words, taken)):
                # The number of the job is in the word: what belongs to it stays until the chunk is done.
                call((pool + WORK).load(), *_chunk(pool, words, is_own))
                (pool + FINISHED).add(1)


def _elsewhere(pool: Integer) -> Integer:
    """Keep workers off the caller's processor, where the system may queue a thread that the caller wakes up.

    Returns whether the caller may use any other.
    """
    b, here, mask = pool.b, processor(pool.b), pool + MASK

    def move() -> Integer:
        left = _leave_out(mask, here)
        with when(left):
            with each(1, (pool + SIZE).load()) as i:
                allow(b, (_thread(pool, i) + NATIVE).load(), 128, mask)
            (pool + AWAY).exchange(here + 1)
        return left

    known = ((pool + AWAY).load() == here + 1) | (here < 0) | (here >= 1024)
    return either(known, lambda: either(allowed(b, 0, 128, mask) < 0, move))


def _leave_out(mask: Integer, processor: Integer) -> Integer:
    """Take a processor out of a set; tell whether any is left."""
    words = [mask + 8 * i for i in range(16)]
    own = mask + (processor >> 6) * 8
    own.exchange(own.load() & ~(1 << (processor & 63)))
    return reduce(or_, [word.load() for word in words]) != 0


def _in_vain(pool: Integer) -> None:
    """Note that small jobs were shared in vain once more."""
    count = pool + IN_VAIN
    count.exchange(smaller(count.load() + 1, _MOST_IN_VAIN))


def _had_better_be_serial(pool: Integer) -> Integer:
    """Return 1 if a small job should let workers be, as they sleep or came late for the ones before, else 0."""
    end, asleep, chances = Ending(pool.b), (_thread(pool, 1) + ASLEEP).load(), pool + CHANCES
    with when((pool + WOKEN).load() != 0):
        (pool + WOKEN).exchange(0)
        with when(asleep != 0):
            chances.exchange(0)
            _in_vain(pool)
    with when((asleep == 0) & (chances.load() != 0)):
        end.leave(number(((pool + SHARED).add(1) + 1) % _ALONE == 0))
    passed = (pool + PASSED).add(1) + 1
    end.leave_if(passed < _PATIENCE << (pool + IN_VAIN).load(), 1)
    (pool + PASSED).exchange(0)
    chances.exchange(_CHANCES)
    (pool + WOKEN).exchange(asleep)
    return end.reached(0)


def _remember(pool: Integer, kind: Integer, taken: Integer) -> None:
    """Keep what a small job took that its caller did alone, or little more than it took before, if it was that job."""
    known, before = (pool + KIND).exchange(kind) == kind, (pool + TAKEN).load()
    (pool + TAKEN).exchange(choose(known, smaller(taken, before + (before >> 3)), taken))


def _judge(pool: Integer, taken: Integer) -> None:
    """Weigh whether a small job that was shared took longer than its caller alone takes."""
    chances = pool + CHANCES
    with whether(taken <= (pool + TAKEN).load()) as (in_time, late):
        with in_time, when(chances.add(1) >= _MOST_CHANCES):
            chances.exchange(_MOST_CHANCES)
            (pool + IN_VAIN).exchange(0)
        with late, when(chances.add(-1) == 1):
            _in_vain(pool)


def _announce(
    pool: Integer, work: Integer, job: Integer, units: Integer, most: Integer
) -> tuple[Integer, Integer, Integer]:
    """Write down a job; return its team, how many chunks it is cut into, and its number."""
    team = smaller(smaller((pool + THREADS).load(), units), most)
    chunks, number = smaller(units, _CHUNKS * team), ((pool + NUMBER).load() + 1) & 0x7FFFFFFF
    words: dict[int, Integer | int] = {
        WORK: work,
        JOB: job,
        UNITS: units,
        CHUNKS: chunks,
        TEAM: team,
        NUMBER: number,
        FINISHED: 0,
    }
    for place, word in words.items():
        (pool + place).exchange(word)
    return team, chunks, number


def _give_range(pool: Integer, i: Integer, team: Integer, chunks: Integer, number: Integer) -> None:
    """Tell a thread which chunks it starts with."""
    words = (number << 32) | ((chunks * i // team) << 16) | (chunks * (i + 1) // team)
    (_thread(pool, i) + RANGE).exchange(words)


def _share_out(pool: Integer, work: Integer, job: Integer, units: Integer, most: Integer) -> Integer:
    """Do a job with other threads, or alone; see `sharing`."""
    b, end, busy = pool.b, Ending(pool.b), pool + BUSY
    with when(either((pool + THREADS).load() < 2, lambda: ~busy.replace(0, 1))):
        end.leave(call(work, job, 0, units))
    small, kind = most < _SMALL, work + (units << 8) + most
    serial = Variable(b, 0)
    with when(small):
        serial.set(_had_better_be_serial(pool))
    alone = serial.now != 0
    if sys.platform == "linux":
        alone = either(alone, lambda: ~_elsewhere(pool))
    with when(alone):
        busy.exchange(0)
        begin = ticks(b)
        call(work, job, 0, units)
        with when(small):
            _remember(pool, kind, ticks(b) - begin)
        end.leave(DONE)
    begin = ticks(b)
    team, chunks, job_number = _announce(pool, work, job, units, most)
    with each(0, team) as i:
        _give_range(pool, i, team, chunks, job_number)
    looks = (pool + LOOKS).load()
    _take_part(pool, 0, smaller(looks // _GRACE, looks * most // _GRACE_A_THREAD))
    with repeat(b) as end_if:
        end_if((pool + FINISHED).load() >= chunks)
        relax(b)
    # Those that were just woken are late in any case.
    with when(small & ((pool + KIND).load() == kind) & ((pool + WOKEN).load() == 0)):
        _judge(pool, ticks(b) - begin)
    busy.exchange(0)
    return end.reached(DONE)


@cache
def sharing() -> Kernel:
    """Return the kernel (pool, work, job, units, most) that `share` calls."""
    return compiled(_share_out, "share", [whole] * 5)


def _serve(pool: Integer, me: Integer) -> int:
    """Take part in jobs; see `serving`."""
    b, place, most = pool.b, _thread(pool, me), (pool + LOOKS).load()
    asleep, ours = place + ASLEEP, place + RANGE
    with repeat(b) as end_if:
        _take_part(pool, me, most // _GRACE)
        looks = Variable(b, 0)
        with repeat(b) as stop_if:
            stop_if(looks.now >= most)
            stop_if(_waiting(ours.load()))
            relax(b)
            looks.set(looks.now + 1)
        end_if(me == 0)
        with when(looks.now == most):
            asleep.exchange(1)
            # A job that came in between has not seen that this thread sleeps; or it has, and releases the lock.
            with when(either(~_waiting(ours.load()), lambda: ~asleep.replace(1, 0))):
                acquire(b, (place + LOCK).load(), 1)
    return DONE


@cache
def serving() -> Kernel:
    """Return the kernel (pool, me) that a worker runs for ever, and the caller, 0, until it found nothing to do."""
    return compiled(_serve, "serve", [whole] * 2)


def share(pool: Integer, work: Integer, job: Integer, units: Integer, most: Integer) -> None:
    """Call work(job, start, stop) for parts of `units` on up to `most` threads of a pool; on this one alone for 0."""
    with whether((pool == 0) | (smaller(units, most) < 2)) as (alone, together):
        with alone:
            call(work, job, 0, units)
        with together:
            call((pool + SHARE).load(), pool, work, job, units, most)
