"""mlxmem: record every allocation of Apple's MLX with the line that caused it.

>>> import mlxmem
>>> mlxmem.enable()
>>> train()
>>> mlxmem.dump("out.pickle")  # open it at https://docs.pytorch.org/memory_viz
"""

from mlxmem._interner import capture_traceback, resolve_traceback
from mlxmem._version import __version__
from mlxmem.cache_advice import cache_stats, recommend_cache_limit
from mlxmem.errors import UnsupportedMLXError
from mlxmem.events import Action
from mlxmem.fork_api import (
    dump_snapshot,
    get_memory_events,
    record_memory_events,
    to_snapshot,
)
from mlxmem.marks import annotate, mark
from mlxmem.merging import merge
from mlxmem.modules import track_modules
from mlxmem.notebook import load_ipython_extension, unload_ipython_extension
from mlxmem.record_block import record
from mlxmem.recorder import (
    Stats,
    disable,
    dump,
    enable,
    events,
    events_array,
    is_enabled,
    snapshot,
    stats,
)

__all__ = [
    "Action",
    "Stats",
    "UnsupportedMLXError",
    "__version__",
    "annotate",
    "cache_stats",
    "capture_traceback",
    "disable",
    "dump",
    "dump_snapshot",
    "enable",
    "events",
    "events_array",
    "get_memory_events",
    "is_enabled",
    "load_ipython_extension",
    "mark",
    "merge",
    "recommend_cache_limit",
    "record",
    "record_memory_events",
    "resolve_traceback",
    "snapshot",
    "stats",
    "to_snapshot",
    "track_modules",
    "unload_ipython_extension",
]
