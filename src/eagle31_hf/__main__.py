"""`python -m eagle31_hf` is the `eagle31` command, where no script of that name is on the path."""

from .cli import main

if __name__ == "__main__":
    main()
