"""`python -m mlxmem`, the same as the command `mlxmem`."""

from mlxmem.cli import main

if __name__ == "__main__":
    main(prog_name="mlxmem")
