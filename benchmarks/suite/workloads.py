"""What people run: each with recording off and on, in turn in one process."""

from __future__ import annotations

from .common import Block, OffAndOn, off_and_on, scaled

TOKENS = 64  # generated in a block
NODES = 200_000

Found = dict[str, OffAndOn]


def transformer_step() -> Block:
    """Return a training step of the example."""
    from step_overhead import step_block

    return step_block(1)


def mlp_step() -> Block:
    """Return a training step of three layers of 256, for 64 rows."""
    import mlx.core as mx
    import mlx.nn as nn
    import mlx.optimizers as optim

    mx.random.seed(0)
    model = nn.Sequential(
        nn.Linear(64, 256), nn.relu, nn.Linear(256, 256), nn.relu, nn.Linear(256, 10)
    )
    optimizer = optim.AdamW(learning_rate=1e-3)
    rows = mx.random.normal((64, 64))
    labels = mx.random.randint(0, 10, (64,))

    def loss_of(rows: mx.array, labels: mx.array) -> mx.array:
        return nn.losses.cross_entropy(model(rows), labels, reduction="mean")

    loss_and_grad = nn.value_and_grad(model, loss_of)

    def step() -> None:
        loss, gradients = loss_and_grad(rows, labels)
        optimizer.update(model, gradients)
        mx.eval(loss, model.parameters(), optimizer.state)

    return step


def generation() -> Block:
    """Return the generation of 64 tokens, one by one.

    Two layers of attention, whose keys and values grow by a concatenation for each
    token.
    """
    import mlx.core as mx
    import mlx.nn as nn

    mx.random.seed(0)
    dims, heads, layers = 128, 4, 2
    embedding = nn.Embedding(100, dims)
    blocks = [nn.MultiHeadAttention(dims, heads) for _ in range(layers)]
    out = nn.Linear(dims, 100)
    mx.eval(embedding.parameters(), [b.parameters() for b in blocks], out.parameters())

    def generate() -> None:
        token = mx.array([1])
        caches: list[tuple[mx.array, mx.array] | None] = [None] * layers
        for _ in range(TOKENS):
            hidden = embedding(token)[None]
            for number, block in enumerate(blocks):
                query, key, value = (
                    project(hidden).reshape(1, 1, heads, -1).transpose(0, 2, 1, 3)
                    for project in (block.query_proj, block.key_proj, block.value_proj)
                )
                if cache := caches[number]:
                    key = mx.concatenate([cache[0], key], axis=2)
                    value = mx.concatenate([cache[1], value], axis=2)
                caches[number] = key, value
                mixed = mx.fast.scaled_dot_product_attention(
                    query, key, value, scale=(dims // heads) ** -0.5
                )
                mixed = mixed.transpose(0, 2, 1, 3).reshape(1, 1, dims)
                hidden = hidden + block.out_proj(mixed)
            token = mx.argmax(out(hidden[0]), axis=-1)
            mx.eval(token, caches)

    return generate


def lazy_nodes() -> Block:
    """Return the making of 200,000 nodes that all live, and then their end."""
    import mlx.core as mx

    one = mx.ones((10, 10))
    mx.eval(one)
    count = scaled(NODES)

    def build() -> None:
        nodes = [one + one for _ in range(count)]
        nodes.clear()

    return build


# What is timed, and how many pairs of blocks.
WORKLOADS = {
    "transformer step": (transformer_step, 40),
    "MLP step": (mlp_step, 200),
    "generation, 64 tokens": (generation, 40),
    "200,000 lazy nodes": (lazy_nodes, 20),
}


def measure() -> Found:
    """Time each workload."""
    return {
        name: off_and_on(make(), scaled(pairs, 2))
        for name, (make, pairs) in WORKLOADS.items()
    }


class Measured:
    """What both classes share: one measurement for all of their numbers."""

    params = (tuple(WORKLOADS),)
    param_names = ("workload",)
    timeout = 900

    def setup_cache(self) -> Found:
        """Measure."""
        return measure()


class Ratios(Measured):
    """Recorded against not recorded."""

    unit = "ratio"

    def track_on_to_off(self, found: Found, workload: str) -> float:
        """Return the median of the ratios of neighbours."""
        return found[workload].ratio

    def track_cpu_on_to_off(self, found: Found, workload: str) -> float:
        """Return the same by processor time, which other programs disturb less."""
        return found[workload].cpu_ratio

    def track_spread(self, found: Found, workload: str) -> float:
        """Return the distance of the quartiles of these ratios."""
        return found[workload].high - found[workload].low


class Seconds(Measured):
    """The time of one block."""

    unit = "s"

    def track_off(self, found: Found, workload: str) -> float:
        """Return the median without recording."""
        return found[workload].off

    def track_on(self, found: Found, workload: str) -> float:
        """Return the median with recording."""
        return found[workload].on
