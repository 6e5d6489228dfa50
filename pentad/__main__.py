"""`python -m pentad`: the command `pentad`, for environments without its script on the path."""

from pentad.cli.main import main

if __name__ == "__main__":
    main()
