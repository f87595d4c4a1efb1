# cython: language_level=3, boundscheck=False, wraparound=False
# distutils: language=c++
"""Replays of a program's requests through the model of the cache (replay.h)."""

from cpython.exc cimport PyErr_CheckSignals
from libc.stddef cimport size_t
from libc.stdint cimport int32_t, int64_t, uint8_t, uint64_t
from libcpp cimport bool as c_bool
from libcpp.vector cimport vector

import numpy as np

cdef extern from "buffer_cache.h" namespace "mlxmem::cache":
    cdef struct Policy:
        uint64_t page
        uint64_t cache_limit
        uint64_t memory_limit
        uint64_t collection_base
        uint64_t resource_limit
        uint64_t slab_size
        uint64_t slab_blocks
        int32_t rounding
        int32_t reclaim
        int32_t has_cache
        int32_t keeps_only_whole
        int32_t trims_at_once

cdef extern from "replay.h" namespace "mlxmem::cache":
    cdef struct Row:
        pass
    cdef struct Rows:
        const Row* first
        size_t count
    cdef struct Cached:
        pass
    cdef struct Totals:
        uint64_t[9] count
        uint64_t[9] requested
        uint64_t system_allocations
        uint64_t system_bytes
        uint64_t evictions
        uint64_t evicted_bytes
        uint64_t peak_active
        uint64_t peak_cache
        uint64_t peak_reserved
        uint64_t peak_waste
        uint64_t waste
        uint64_t active
        uint64_t cache
        uint64_t checked
        uint64_t mismatches
        uint64_t raced
        uint64_t unseen
    cdef cppclass Replay:
        size_t run(size_t, size_t) except + nogil
        void finish() except +
        const Totals& totals()
    cdef cppclass Outputs "mlxmem::cache::Replay::Outputs":
        uint8_t* outcomes
        int64_t* causes
        int64_t* reserved
        uint8_t* unseen
        vector[int64_t]* mismatches
        size_t most_mismatches

cdef extern from "predict.h" namespace "mlxmem::cache":
    cdef cppclass Prediction(Replay):
        Prediction(
            const Policy&, const Rows&, const Cached*, size_t, uint64_t, uint64_t,
            c_bool, const Outputs&,
        ) except +

cdef extern from "follow.h" namespace "mlxmem::cache":
    cdef cppclass Following(Replay):
        Following(
            const Policy&, const Rows&, const Cached*, size_t, uint64_t, uint64_t,
            const Outputs&,
        ) except +

ROW = np.dtype(
    [
        ("address", "u8"),
        ("size", "i8"),
        ("requested", "i8"),
        ("owner", "i8"),
        ("op", "u1"),
        ("recorded", "u1"),
        ("call", "u1"),
        ("after_look", "u1"),
        ("reserved", "u1", (4,)),
    ]
)
CACHED = np.dtype([("address", "u8"), ("size", "u8")])

cdef enum:
    MOST_MISMATCHES = 100
    AT_A_TIME = 50_000  # rows between two looks for Ctrl-C


cdef Policy _policy(object policy):
    cdef Policy out
    out.page = policy.page
    out.cache_limit = policy.cache_limit
    out.memory_limit = policy.memory_limit
    out.collection_base = policy.collection_base
    out.resource_limit = policy.resource_limit
    out.slab_size = policy.slab_size
    out.slab_blocks = policy.slab_blocks
    out.rounding = policy.rounding
    out.reclaim = policy.reclaim
    out.has_cache = policy.has_cache
    out.keeps_only_whole = policy.keeps_only_whole
    out.trims_at_once = policy.trims_at_once
    return out


cdef dict _run(Replay* replay, size_t n):
    """Replay all rows, and return the totals; the replay is gone afterwards."""
    cdef size_t row = 0
    cdef Totals totals
    try:
        while row < n:
            with nogil:
                row = replay.run(row, AT_A_TIME)
            PyErr_CheckSignals()
        replay.finish()
        totals = replay.totals()
        return totals
    finally:
        del replay


cdef class _Arrays:
    """The arrays of one replay, held while it runs."""

    cdef Rows rows
    cdef const Cached* cached
    cdef size_t cached_count
    cdef object keep

    def __cinit__(self, rows, cached):
        rows = np.ascontiguousarray(rows, ROW)
        cached = np.ascontiguousarray(cached, CACHED)
        self.keep = rows, cached
        cdef const uint8_t[::1] raw = rows.view(np.uint8).ravel()
        cdef const uint8_t[::1] raw_cached = cached.view(np.uint8).ravel()
        self.rows.count = len(rows)
        self.rows.first = <const Row*>&raw[0] if len(rows) else NULL
        self.cached_count = len(cached)
        self.cached = <const Cached*>&raw_cached[0] if len(cached) else NULL


def predict(
    rows, cached, unknown, active, policy, *, fixed_limit, outcomes=False, curve=False
):
    """Replay the requests and let the policy decide.

    Parameters
    ----------
    rows : ndarray of ROW, shape (n,)
    cached : ndarray of CACHED
        In the cache before the first row, oldest first.
    unknown : int
        Bytes that are cached all along and of which nothing else is known.
    active : int
        Bytes in use before the first row.
    policy : Policy
    fixed_limit : bool
        Whether the cache limit stays what the policy says, whatever the rows set.
    outcomes, curve : bool
        What to return beside the totals.

    Returns
    -------
    totals : dict
    outcomes : ndarray of uint8, shape (n,) or None
        An `Outcome` for each row.
    causes : ndarray of int64, shape (n,) or None
        Row of the call that took what would have served, or that set the limit for
        which it went; -1 = none.
    reserved : ndarray of int64, shape (n,) or None
        Bytes after each row.
    """
    cdef _Arrays arrays = _Arrays(rows, cached)
    cdef size_t n = arrays.rows.count
    cdef uint8_t[::1] outcome = np.zeros(n + 1, np.uint8)
    cdef int64_t[::1] cause = np.full(n + 1, -1, np.int64)
    cdef int64_t[::1] reserved = np.zeros((n if curve else 0) + 1, np.int64)
    cdef Outputs outputs
    outputs.outcomes = &outcome[0] if outcomes else NULL
    outputs.causes = &cause[0]
    outputs.reserved = &reserved[0] if curve else NULL
    cdef c_bool overrides = fixed_limit
    cdef Replay* replay = new Prediction(
        _policy(policy), arrays.rows, arrays.cached, arrays.cached_count, unknown,
        active, overrides, outputs,
    )
    totals = _run(replay, n)
    return (
        totals,
        np.asarray(outcome)[:n] if outcomes else None,
        np.asarray(cause)[:n] if outcomes else None,
        np.asarray(reserved)[:n] if curve else None,
    )


def follow(rows, cached, unknown, active, policy):
    """Replay what was recorded, and compare each decision with the policy's.

    Parameters
    ----------
    rows, cached, unknown, active, policy
        As for `predict`.

    Returns
    -------
    totals : dict
    outcomes, causes : ndarray, shape (n,)
        As from `predict`, of the recording itself.
    unseen : ndarray of bool, shape (n,)
        Where a clear of the cache begins that no call explains.
    mismatches : list of int
        The first rows at which the policy decides otherwise; n = at the end.
    """
    cdef _Arrays arrays = _Arrays(rows, cached)
    cdef size_t n = arrays.rows.count
    cdef uint8_t[::1] outcome = np.zeros(n + 1, np.uint8)
    cdef int64_t[::1] cause = np.full(n + 1, -1, np.int64)
    cdef uint8_t[::1] unseen = np.zeros(n + 1, np.uint8)
    cdef vector[int64_t] mismatches
    cdef Outputs outputs
    outputs.outcomes = &outcome[0]
    outputs.causes = &cause[0]
    outputs.reserved = NULL
    outputs.unseen = &unseen[0]
    outputs.mismatches = &mismatches
    outputs.most_mismatches = MOST_MISMATCHES
    cdef Replay* replay = new Following(
        _policy(policy), arrays.rows, arrays.cached, arrays.cached_count, unknown,
        active, outputs,
    )
    totals = _run(replay, n)
    return (
        totals,
        np.asarray(outcome)[:n],
        np.asarray(cause)[:n],
        np.asarray(unseen)[:n].astype(bool),
        list(mismatches),
    )
