"""The command as a module: python -m lpbnn, and torchrun -m lpbnn."""

from lpbnn.extras import EXTRAS, missing


def main() -> None:
    """Run the command; a package of an extra that is not installed is told in one line."""
    try:
        from lpbnn.cli import main as command

        command()
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in EXTRAS:
            raise
        raise SystemExit(f"error: {missing(error)}") from None


if __name__ == "__main__":
    main()
