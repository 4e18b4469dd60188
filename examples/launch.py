"""Start a script as several ranks on this machine, as torchrun would, without torch:

python examples/launch.py 3 examples/numpy_mlp.py
"""

import os
import socket
import subprocess
import sys


def main() -> int:
    ranks, command = int(sys.argv[1]), sys.argv[2:]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = []
    for rank in range(ranks):
        place = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": ranks}
        place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        environment = os.environ | {name: str(value) for name, value in place.items()}
        processes.append(subprocess.Popen([sys.executable, *command], env=environment))
    # A rank that dies makes the others fail, too: nobody is left waiting.
    return max(abs(process.wait()) for process in processes)


if __name__ == "__main__":
    sys.exit(main())
