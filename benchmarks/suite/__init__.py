"""The asv suite: one module per topic, with what they share in `common`.

Nothing here imports mlxmem before a benchmark asks for it, since some measure how fast
MLX is without it.
"""
