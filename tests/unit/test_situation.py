"""What a rank says of the others when something goes wrong."""

import os
import socket
import time

import pytest

from dflash_train.situation import Peer, Situation


def test_a_peer_that_is_about_to_be_gone_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    """Its connections are closed a moment before the process is: here, a third of a second."""
    child = os.fork()
    if not child:
        time.sleep(0.3)
        os._exit(0)
    peer = Peer(1, "drafter rank", socket.gethostname(), child)
    Situation(0, "target rank", doing="handing a pack over", peers=[peer]).last_words("Connection reset by peer")
    os.waitpid(child, 0)
    line = (
        f"error: drafter rank 1 (pid {child}) is gone; target rank 0, handing a pack over: Connection reset by peer\n"
    )
    assert capsys.readouterr().err == line
