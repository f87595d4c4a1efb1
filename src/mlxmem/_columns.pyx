# cython: language_level=3
# cython: boundscheck=False, wraparound=False, initializedcheck=False
"""Columns out of a list of dicts: a trace has millions of entries.

A comprehension per key takes several times as long.
"""

from cpython.dict cimport PyDict_CheckExact
from cpython.long cimport PyLong_CheckExact
from cpython.ref cimport PyObject
from libc.stdint cimport int64_t, uint64_t

import numpy as np

cdef extern from "Python.h":
    PyObject* PyDict_GetItemWithError(object, object) except? NULL
    int64_t PyLong_AsLongLong(object) except? -1
    uint64_t PyLong_AsUnsignedLongLong(object) except? 0xFFFFFFFFFFFFFFFF


cdef PyObject* value_of(object entry, object key) except? NULL:
    if not PyDict_CheckExact(entry):
        raise TypeError(f"an entry is a {type(entry).__name__}, not a dict")
    return PyDict_GetItemWithError(entry, key)


def numbers(list entries, str key, bint unsigned=False):
    """Return the int of each dict at a key, 0 where it is missing.

    Returns
    -------
    ndarray of int64 or uint64, shape (len(entries),)

    Raises
    ------
    TypeError, OverflowError
        An entry is no dict, or a value no int that fits.
    """
    cdef Py_ssize_t i, count = len(entries)
    cdef PyObject* value
    column = np.zeros(count, np.uint64 if unsigned else np.int64)
    cdef uint64_t[::1] out = column.view(np.uint64)
    for i in range(count):
        value = value_of(entries[i], key)
        if value == NULL:
            continue
        # bool is an int, too, and float could be rounded to one.
        if not PyLong_CheckExact(<object>value):
            kind = type(<object>value).__name__
            raise TypeError(f"{key!r} is a {kind}, not an int")
        if unsigned:
            out[i] = PyLong_AsUnsignedLongLong(<object>value)
        else:
            out[i] = <uint64_t>PyLong_AsLongLong(<object>value)
    return column


def distinct(list entries, str key):
    """Return the objects of the dicts at a key, each identity once.

    Returns
    -------
    index : ndarray of int32, shape (len(entries),)
    objects : list
        In the order of their first entry; None where the key is missing.
    """
    cdef Py_ssize_t i, count = len(entries)
    addresses = np.zeros(count, np.uint64)
    cdef uint64_t[::1] out = addresses
    for i in range(count):
        out[i] = <uint64_t>value_of(entries[i], key)
    _, first, index = np.unique(addresses, return_index=True, return_inverse=True)
    # By first entry, since addresses differ from run to run.
    order = np.argsort(first)
    rank = np.empty(len(order), np.int32)
    rank[order] = np.arange(len(order), dtype=np.int32)
    return rank[index], [entries[at].get(key) for at in first[order].tolist()]
