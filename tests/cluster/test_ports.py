"""Ports: different, free, held until released, and outside the range that the system gives away."""

import socket
from contextlib import ExitStack
from pathlib import Path

import pytest

from tfdist.cluster.ports import HOST, hold_ports


def test_ports_are_held_until_released():
    with ExitStack() as held:
        ports = hold_ports(20, held)
        assert len(set(ports)) == 20
        for port in ports:
            with pytest.raises(OSError, match="in use"):
                socket.create_server((HOST, port))
    for port in ports:
        socket.create_server((HOST, port)).close()


def test_a_port_of_connections_that_have_ended_is_taken():
    """A worker that was killed leaves some for a minute, and the job is to be started again at once."""
    with socket.create_server((HOST, 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection((HOST, port)):
            server.accept()[0].close()  # who ends first keeps the connection in TIME_WAIT
    with pytest.raises(OSError, match="in use"), socket.socket() as plain:
        plain.bind((HOST, port))
    with ExitStack() as held:
        assert hold_ports(1, held, start_port=port) == [port]


@pytest.mark.skipif(not Path("/proc/sys/net/ipv4/ip_local_port_range").exists(), reason="only Linux says the range")
def test_ports_are_not_ephemeral_ones():
    low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    if low < 12_000:
        pytest.skip("this machine leaves no room below its ephemeral range")
    with ExitStack() as held:
        assert max(hold_ports(20, held)) < low
