"""`python -m detkern`: the command line."""

from .cli.main import main

if __name__ == "__main__":
    main(prog_name="python -m detkern")
