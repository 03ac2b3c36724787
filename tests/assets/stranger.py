"""What a host does at the ports of a job whose key it lacks: ``stranger MARK OTHER_KEY JOB_KEY HOST:PORT...``.

Prints, as JSON, how many servers it spoke to, who let it in, and how many would have with the job's key. ``MARK`` is a
file that exists afterwards if something that the host sent was unpickled.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
from typing import Any

from helpers import LIMIT
from strangers import attack_servers, attack_stores, let_in

from gtrain.keys import ISOLATED

SECONDS = 2.0
"""How long it tries to join with each key; a server does not say that the key is wrong."""


class Payload:
    """What runs a command when it is unpickled."""

    def __init__(self, mark: str) -> None:
        self._mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self._mark}",)


if __name__ == "__main__":
    mark, other_key, job_key, *words = sys.argv[1:]
    addresses = [(host, int(port)) for host, _, port in (word.rpartition(":") for word in words)]
    entered = [address for key in (other_key, ISOLATED) for address in let_in(addresses, key, SECONDS)]
    attack_stores(addresses, pickle.dumps(Payload(mark)))
    servers, possible = attack_servers(addresses), let_in(addresses, job_key, LIMIT)
    print(json.dumps({"servers": servers, "let_in": entered, "possible": len(possible)}))
