"""MLX's buffer cache as a model, and recordings replayed through it."""
