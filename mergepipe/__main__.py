"""Run the command line with ``python -m mergepipe``."""

from mergepipe.cli.main import main

if __name__ == "__main__":
    main()
