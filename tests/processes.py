"""Processes of a test, in a file that is quick to import: each child imports it anew."""

import multiprocessing
import time
from multiprocessing.connection import Connection


def a_run(here: Connection) -> None:
    """Be a run of an experiment that goes on for long."""
    from lpbnn.experiments._suite import end_with_the_command

    end_with_the_command()
    here.send("training")
    time.sleep(120)


def a_command(here: Connection) -> None:
    """Be a command that has started a run."""
    multiprocessing.get_context("spawn").Process(target=a_run, args=(here,)).start()
    time.sleep(120)
