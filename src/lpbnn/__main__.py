"""The command as a module: python -m lpbnn, and torchrun -m lpbnn."""

from lpbnn.cli import main

if __name__ == "__main__":
    main()
