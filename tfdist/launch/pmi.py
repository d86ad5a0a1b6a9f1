"""How processes started here become one MPI job: a server of PMI-1, which MPICH and its relatives speak.

A process finds the server through the descriptor in PMI_FD, puts its address there, waits at a barrier until all
have, and gets those of the others. mpiexec would do the same, but be the parent of the workers: launch would neither
know their processes nor their exit codes. A descriptor also reaches workers in network namespaces of their own.

Reference: Balaji et al., PMI: A scalable parallel process-management interface for extreme-scale systems, 2010.
"""

import os
import secrets
import selectors
import socket
import threading
from pathlib import Path

_LONGEST = {"kvsname_max": 256, "keylen_max": 64, "vallen_max": 1024}


class PMIServer:
    """Serves the processes of one job, in a thread, until `close`.

    Args:
        size: how many processes.
    """

    def __init__(self, size: int):
        self._size = size
        # MPICH names shared memory after it: of two jobs with one name, one would not start.
        self._name = f"tfdist_{os.getpid()}_{secrets.token_hex(8)}"
        # All on one machine, as MPICH writes it: from node 0 on, one node, with `size` processes.
        self._values = {"PMI_process_mapping": f"(vector,(0,1,{size}))"}
        self._at_barrier: list[socket.socket] = []
        self._given: list[socket.socket] = []
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        self._selector.register(self._woken, selectors.EVENT_READ)
        for _ in range(size):
            own, given = socket.socketpair()
            self._given.append(given)
            self._selector.register(own, selectors.EVENT_READ, bytearray())
        self._thread = threading.Thread(target=self._serve, name="tfdist-pmi", daemon=True)
        self._thread.start()

    def environment(self, rank: int) -> dict[str, str]:
        """Returns what the process of that rank needs in its environment."""
        return {"PMI_RANK": str(rank), "PMI_SIZE": str(self._size), "PMI_FD": str(self.descriptor(rank))}

    def descriptor(self, rank: int) -> int:
        """Returns the descriptor that the process of that rank has to inherit."""
        return self._given[rank].fileno()

    def started(self, rank: int) -> None:
        """Gives up the descriptor here, once the process has it."""
        self._given[rank].close()

    def close(self) -> None:
        """Ends the thread, closes all connections, and removes the memory that killed processes have shared."""
        self._wake.close()
        self._thread.join()
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()
        for given in self._given:
            given.close()
        self._selector.close()
        self._shared_memory.unlink(missing_ok=True)

    @property
    def _shared_memory(self) -> Path:
        """The file of the memory that the processes share, which MPICH names by the FNV-1a hash of the job's name."""
        value = 0x811C9DC5
        for byte in self._name.encode():
            value = (value ^ byte) * 0x01000193 & 0xFFFFFFFF
        return Path(f"/dev/shm/mpich_shm_{value:x}_0")

    def _serve(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._woken:
                    return
                self._read(key.fileobj, key.data)

    def _read(self, connection: socket.socket, buffer: bytearray) -> None:
        try:
            received = connection.recv(1 << 16)
        except OSError:
            received = b""
        if not received:
            self._selector.unregister(connection)
            connection.close()
            return
        buffer += received
        while b"\n" in buffer:
            line, _, rest = bytes(buffer).partition(b"\n")
            buffer[:] = rest
            self._answer(connection, line.decode(errors="replace"))

    def _answer(self, connection: socket.socket, line: str) -> None:
        asked = dict(word.split("=", 1) for word in line.split(" ") if "=" in word)
        command = asked.get("cmd", "")
        if command == "barrier_in":
            self._at_barrier.append(connection)
            if len(self._at_barrier) == self._size:
                for waiting in self._at_barrier:
                    _tell(waiting, cmd="barrier_out", rc=0)
                self._at_barrier.clear()
        elif command == "init":
            _tell(connection, cmd="response_to_init", rc=0, pmi_version=1, pmi_subversion=1)
        elif command == "get_maxes":
            _tell(connection, cmd="maxes", rc=0, **_LONGEST)
        elif command == "get_appnum":
            _tell(connection, cmd="appnum", rc=0, appnum=0)
        elif command == "get_universe_size":
            _tell(connection, cmd="universe_size", rc=0, size=self._size)
        elif command == "get_my_kvsname":
            _tell(connection, cmd="my_kvsname", rc=0, kvsname=self._name)
        elif command == "put":
            self._values[asked.get("key", "")] = asked.get("value", "")
            _tell(connection, cmd="put_result", rc=0, msg="success")
        elif command == "get":
            value = self._values.get(asked.get("key", ""))
            found = {"rc": 0, "msg": "success", "value": value}
            _tell(connection, cmd="get_result", **(found if value is not None else {"rc": -1, "msg": "key_not_found"}))
        elif command == "finalize":
            _tell(connection, cmd="finalize_ack", rc=0)
        elif command != "abort":  # after which the process ends by itself
            _tell(connection, cmd=command, rc=-1, msg="unknown_command")


def _tell(connection: socket.socket, **words: object) -> None:
    try:
        connection.sendall((" ".join(f"{key}={value}" for key, value in words.items()) + "\n").encode())
    except OSError:
        pass  # it has ended, which its supervisor sees
