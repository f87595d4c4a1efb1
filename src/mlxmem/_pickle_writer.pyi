from collections.abc import Callable, Sequence

def dump(
    value: dict[str, object],
    write: Callable[[memoryview], object],
    *,
    first: Sequence[str | tuple[int, ...]] = (),
    on_rows: Callable[[int], object] | None = None,
) -> None: ...
