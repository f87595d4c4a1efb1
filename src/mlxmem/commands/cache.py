"""`mlxmem cache`: what the buffer cache did, and what another limit would do."""

from __future__ import annotations

from typing import Any

import click
from rich.console import RenderableType
from rich.text import Text

from mlxmem.cache.policies import NO_LIMIT, chosen_policy
from mlxmem.commands import _report
from mlxmem.commands._help import examples
from mlxmem.limits import UNSEEN
from mlxmem.reports import render
from mlxmem.reports.cache import MISS_REASONS, TAKERS, WHEN_TAKEN, cache
from mlxmem.units import parse_bytes

_LIMITS = 3  # that are named, the last ones
_MORE = 0.05  # of the hit rate, from which on padding is advised
_BAR = 40  # columns
_RATES = ("hit_rate", "hit_rate_bytes")
_STEP = 0.01  # of a rate, from which on the curve shows another point


@click.command(
    epilog=examples(
        "mlxmem cache out.pickle",
        "mlxmem cache out.pickle --limit 64MB --limit 1GB",
        "mlxmem cache out.pickle --policy metal --ram 16GB",
        "mlxmem cache out.pickle --json | jq .what_if.recommendation.cache_limit",
    )
)
@_report.FILE
@_report.options(top=10)
@click.option(
    "--limit",
    "limits",
    metavar="SIZE",
    multiple=True,
    help="Replay under this cache limit, like 64MB, or none; may be repeated.",
)
@click.option(
    "--policy", help="Replay under the rules of this backend: cpu, metal or cuda."
)
@click.option("--ram", metavar="SIZE", help="Memory of the machine, for metal.")
@click.option(
    "--working-set",
    metavar="SIZE",
    help="What Metal recommends, for metal; else the usual part of --ram.",
)
@click.option("--total", metavar="SIZE", help="Memory of the device, for cuda.")
@_report.one_line_errors
def command(
    file: str,
    by: str,
    top: int,
    device: int | None,
    as_json: bool,
    limits: tuple[str, ...],
    policy: str | None,
    ram: str | None,
    working_set: str | None,
    total: str | None,
) -> None:
    """Show what MLX's buffer cache did, and what another limit would have done.

    Each request that the cache did not serve is a miss; the table says why. The
    recording is then replayed through a model of the cache under other limits.
    """
    sizes = [_limit_of(limit) for limit in limits]
    chosen = chosen_policy(policy, ram, working_set, total)
    history = _report.read(file, device)
    with _report.working("replaying under other limits"):
        report = cache(history, by, top, sizes, chosen)
    _report.show(report, as_json, *parts(report))


def _limit_of(size: str) -> int:
    if size.lower() == "none":
        return NO_LIMIT
    try:
        return parse_bytes(size)
    except ValueError as error:
        raise ValueError(f"--limit: {error}") from None


def parts(report: dict[str, Any]) -> list[RenderableType]:
    """Return what is printed."""
    found: list[RenderableType] = [render.title(report), *_dropped(report)]
    if not report["totals"]["allocations"]:
        return [*found, Text("Nothing was allocated.")]
    found += [_recommendation(report), *_advice(report), Text(), *_totals(report)]
    found += [Text(), _misses(report), *_evicted_by(report), Text(), _lines(report)]
    if report["policy"]["has_cache"]:
        found += [Text(), *_what_if(report), *_curve(report), *_rounding(report)]
        found += [Text(), *_contents(report)]
    return found


def _dropped(report: dict[str, Any]) -> list[RenderableType]:
    if not report["dropped"]:
        return []
    text = "All below is of the events that were kept, the recommendation too."
    return [Text(text, style="yellow")]


def _recommendation(report: dict[str, Any]) -> RenderableType:
    found = report["what_if"]["recommendation"]
    limit = found["cache_limit"]
    if limit is None:
        return _line("Recommended", f"nothing: {found['reason']}")
    text = f"mx.set_cache_limit({limit})"
    if limit >= 1024:
        text += f", {render.size(limit)}"
    return _line("Recommended", f"{text}: {found['reason']}")


def _advice(report: dict[str, Any]) -> list[RenderableType]:
    """Say so where fewer sizes do more than any limit."""
    rounding = report["what_if"]["rounding"]
    best = report["what_if"]["recommendation"]
    if rounding is None or best["cache_limit"] is None:
        return []
    steps = [row for row in rounding["steps"] if row["steps_per_doubling"]]
    more = next((r for r in steps if r["hit_rate"] >= best["hit_rate"] + _MORE), None)
    if more is None:
        return []
    names = ", ".join(render.short(label) for label in rounding["lines"][:3])
    return [
        _line(
            "More helps",
            f"pad the sizes of {names}: with {more['steps_per_doubling']} sizes in "
            f"each doubling {more['hit_rate']:.1%} of requests hit, and reserved peaks "
            f"at {render.size(more['peak_reserved'])}",
        )
    ]


def _line(label: str, text: str) -> Text:
    line = Text(f"{label}: ", style="bold")
    line.append(text, style="not bold")
    return line


def _totals(report: dict[str, Any]) -> list[RenderableType]:
    totals = report["totals"]
    hits = (
        f"{totals['hit_rate']:.1%} of {render.count(totals['allocations'])} requests, "
        f"{totals['hit_rate_bytes']:.1%} of {render.size(totals['requested_bytes'])}"
    )
    found = [
        _line("Hits", hits),
        _line(
            "Reserved",
            f"at most {render.size(totals['peak_reserved'])}; active at most "
            f"{render.size(totals['peak_active'])} and the cache at most "
            f"{render.size(totals['peak_cache'])}, each at its own moment",
        ),
        _line(
            "From the system",
            f"{render.count(totals['system_allocations'])} buffers, "
            f"{render.size(totals['system_bytes'])}; "
            f"{render.count(totals['system_allocations_per_s'])} a second, "
            f"{render.size(totals['system_bytes_per_s'])} a second",
        ),
        _line(
            "Waste of reuse",
            f"{render.size(totals['waste_bytes'])} over all reuses, at most "
            f"{render.size(totals['peak_waste'])} at a time",
        ),
        _line("Limit of the cache", _limits(report)),
    ]
    times = report["times"]
    if times:
        reused = times["reused_us"]
        text = f"{times['new_us']:.2f} us for a new buffer"
        if reused is not None:
            text += f", {reused:.2f} us for a cached one"
        share = times["lost_us"] / max(totals["duration_us"], 1)
        text += (
            f"; misses cost about {render.duration(times['lost_us'])} of "
            f"{render.duration(totals['duration_us'])}, {share:.1%}"
        )
        found.append(_line("Time in the allocator", text))
    return [*found, *_agreement(report)]


def _limits(report: dict[str, Any]) -> str:
    policy = report["policy"]
    if not policy["has_cache"]:
        return "none: this MLX caches nothing on the CPU"
    first = policy["cache_limit"]
    text = "not known" if first is None else render.size(first)
    text += " at the start"
    rows = report["limits"]
    for row in rows[-_LIMITS:]:
        text += f", {render.size(row['value'])} from {_place(row['frames'])}"
    if len(rows) > _LIMITS:
        text += f" (the last {_LIMITS} of {len(rows)})"
    return text


def _place(frames: list[dict[str, Any]]) -> str:
    return render.where(frames) or UNSEEN


def _agreement(report: dict[str, Any]) -> list[RenderableType]:
    found = report["agreement"]
    if found["mismatches"]:
        text = (
            f"{render.count(found['mismatches'])} of "
            f"{render.count(found['checked'])} decisions differ, first at entry "
            f"{found['first_at']}: take what is said of other limits with care"
        )
    else:
        text = (
            f"the replay took all {render.count(found['checked'])} decisions as MLX "
            "did, so that it can tell what other limits do"
        )
    if found["unseen"]:
        text += (
            f"; {found['unseen']} times the cache gave buffers back for a call that "
            "was not seen or is no longer kept, which is taken for what it did then"
        )
    return [_line("Check", text)]


def _misses(report: dict[str, Any]) -> RenderableType:
    cells = [
        (
            f"{row['share']:.1%}",
            render.count(row["count"]),
            render.size(row["bytes"]),
            Text(f"{row['kind']}: {_reason(report, row['kind'])}"),
        )
        for row in report["misses"]
        if row["count"]
    ]
    if not cells:
        return Text("No request missed the cache.")
    columns = ("requests", "misses", "bytes", "why")
    return render.table("Misses", columns, cells)


def _reason(report: dict[str, Any], kind: str) -> str:
    if kind == "limit" and not report["policy"]["has_cache"]:
        return "one was freed, and this MLX keeps nothing"
    return MISS_REASONS[kind]


def _evicted_by(report: dict[str, Any]) -> list[RenderableType]:
    rows = report["evicted_by"]
    if not rows:
        return []
    cells = []
    for row in rows:
        what = TAKERS[row["kind"]]
        if row["call"]:
            value = "" if row["call"] == "clear_cache" else render.size(row["value"])
            what = f"{row['call']}({value}) at {_place(row['frames'])}"
            what += WHEN_TAKEN.get(row["kind"], "")
        cells.append((render.count(row["misses"]), render.size(row["bytes"]), what))
    columns = ("misses", "bytes", "what took the buffers that would have served")
    return [Text(), render.table("Buffers that were lost", columns, cells)]


def _lines(report: dict[str, Any]) -> RenderableType:
    cells = [
        (
            render.size(row["missed_bytes"]),
            f"{row['hit_rate']:.1%}",
            render.count(row["allocations"]),
            render.count(row["sizes"]),
            f"{render.size(row['smallest'])} - {render.size(row['largest'])}",
            _main_miss(row),
            "yes" if row["jumps"] else "",
            render.name(row),
        )
        for row in report["lines"]
    ]
    columns = (
        "missed",
        "hits",
        "requests",
        "sizes",
        "from - to",
        "mostly",
        "jumps",
        report["by"],
    )
    return render.table("By missed bytes", columns, cells)


def _main_miss(row: dict[str, Any]) -> str:
    kind, most = max(row["misses"].items(), key=lambda item: item[1])
    return str(kind) if most else ""


def _contents(report: dict[str, Any]) -> list[RenderableType]:
    found: list[RenderableType] = []
    contents = report["contents"]
    for name, label in (("most", "Cache at its fullest"), ("end", "Cache at the end")):
        part = contents[name]
        if part == contents["most"] and name == "end":
            continue
        if contents["end"] == contents["most"]:
            label += ", which is at the end"
        when = (
            f"after {render.duration(part['time_us'])} (entry {part['at']:,})"
            if part["at"] >= 0
            else "before the first entry"
        )
        text = f"{render.size(part['bytes'])} in {part['buffers']:,} buffers, {when}"
        if part["unknown_bytes"]:
            text += (
                f"; {render.size(part['unknown_bytes'])} of it from before the "
                "recording, in buffers that nothing used since"
            )
        found.append(_line(label, text))
        if part["buffers"]:
            found += [_sizes(part), _ages(part)]
    return found


def _sizes(part: dict[str, Any]) -> Text:
    return _histogram(
        "sizes",
        part["sizes"],
        lambda row: f"{render.size(row['from_bytes'])}+",
    )


def _ages(part: dict[str, Any]) -> Text:
    return _histogram(
        "ages",
        part["ages"],
        lambda row: (
            f"{render.duration(row['from_us'])}+" if row["from_us"] else "< 1.0 ms"
        ),
    )


def _histogram(name: str, rows: list[dict[str, Any]], label: Any) -> Text:
    most = sorted(rows, key=lambda row: -row["bytes"])[:6]
    shown = [
        f"{label(row)} {render.size(row['bytes'])} ({row['buffers']:,})"
        for row in rows
        if row in most
    ]
    rest = f", and {len(rows) - len(shown)} more" if len(rows) > len(shown) else ""
    return Text(f"  {name}: {', '.join(shown)}{rest}")


def _what_if(report: dict[str, Any]) -> list[RenderableType]:
    what_if, totals = report["what_if"], report["totals"]
    label = "as recorded"
    if not what_if["recorded"]:
        label += f", on {report['policy']['name']}"
    set_here = [row["value"] for row in report["limits"]]
    limits = {report["policy"]["cache_limit"], *set_here}
    recorded = "varies" if len(limits) > 1 else _limit(report["policy"])
    rows = [(label, recorded, totals)]
    rows += [(row["label"], _limit(row), row) for row in what_if["rows"]]
    cells = [
        (
            limit,
            *_rate(row),
            render.count(row["hits"]),
            render.count(row["system_allocations"]),
            render.size(row["peak_reserved"]),
            Text(label),
        )
        for label, limit, row in rows
    ]
    columns = (
        "cache limit",
        "hit rate",
        "bytes hit",
        "hits",
        "new buffers",
        "peak reserved",
        "",
    )
    found: list[RenderableType] = [
        render.table(f"What if{_under(what_if)}", columns, cells)
    ]
    if not what_if["exact"]:
        text = (
            "  about: not all is known of what was cached before the first event that "
            "was kept"
        )
        found.append(Text(text, style="dim"))
    return found


def _under(what_if: dict[str, Any]) -> str:
    return (
        ""
        if what_if["recorded"]
        else f", under the rules of {what_if['policy']['name']}"
    )


def _limit(row: dict[str, Any]) -> str:
    return "none" if row["cache_limit"] is None else render.size(row["cache_limit"])


def _curve(report: dict[str, Any]) -> list[RenderableType]:
    """Draw the hit rate against the limit, without limits that change little."""
    points = report["what_if"]["curve"]
    if not points or not points[-1]["hits"]:
        return []
    shown = points[:1]
    for point in points[1:-1]:
        if any(abs(point[key] - shown[-1][key]) >= _STEP for key in _RATES):
            shown.append(point)
    if any(points[-1][key] != shown[-1][key] for key in _RATES):
        shown.append(points[-1])
    cells = [
        (
            _limit(point),
            *_rate(point),
            render.size(point["peak_reserved"]),
            Text("█" * round(point["hit_rate"] * _BAR), style="cyan"),
        )
        for point in shown
    ]
    columns = ("cache limit", "hit rate", "bytes hit", "peak reserved", "")
    return [Text(), render.table("Hit rate by cache limit", columns, cells)]


def _rate(point: dict[str, Any]) -> tuple[str, str]:
    return f"{point['hit_rate']:.1%}", f"{point['hit_rate_bytes']:.1%}"


def _rounding(report: dict[str, Any]) -> list[RenderableType]:
    found = report["what_if"]["rounding"]
    if found is None:
        return []
    cells = [
        (
            *_rate(row),
            render.count(row["system_allocations"]),
            render.size(row["peak_reserved"]),
            Text(
                "as they are"
                if row["steps_per_doubling"] is None
                else "powers of two"
                if row["steps_per_doubling"] == 1
                else f"{row['steps_per_doubling']} sizes in each doubling"
            ),
        )
        for row in found["steps"]
    ]
    columns = (
        "hit rate",
        "bytes hit",
        "new buffers",
        "peak reserved",
        "sizes rounded up to",
    )
    names = ", ".join(render.short(label) for label in found["lines"][:5])
    more = len(found["lines"]) - 5
    return [
        Text(),
        render.table("Where sizes jump, rounded up", columns, cells),
        Text(
            f"  of {names}"
            + (f" and {more} more" if more > 0 else "")
            + ", under the limits as they were set",
            style="dim",
        ),
    ]
