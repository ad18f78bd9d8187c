"""Runs cases of Autobahn against the address, and writes how each of them ended, one JSON object a line.

A case waits for the node as long as its text says, most often 1 s, and ends when it has all that it expects. On a busy machine
a second can be too short, so that each case waits longer here; nothing else of a case is changed.
"""

import asyncio
import json
import sys

import kosoku.cases  # noqa: F401, puts `case` on the path
from case import Case
from kosoku import FailureError, run_fuzzingclient

LONGER = 20


class Patient:
    """The connection of a case, whose waits are longer."""

    def __init__(self, connection):
        object.__setattr__(self, "connection", connection)

    def __getattr__(self, name):
        return getattr(self.connection, name)

    def __setattr__(self, name, value):
        setattr(self.connection, name, value)

    def closeAfter(self, seconds):  # noqa: N802, the suite's name
        self.connection.closeAfter(LONGER * seconds)

    def killAfter(self, seconds):  # noqa: N802, the suite's name
        self.connection.killAfter(LONGER * seconds)


begin = Case.__init__
Case.__init__ = lambda case, connection: begin(case, Patient(connection))


async def main() -> None:
    address, concurrency, cases, excluded = sys.argv[1:]
    try:
        results = await run_fuzzingclient(
            address, cases.split(), excluded.split() or None, int(concurrency)
        )
    except FailureError as failed:
        results = failed.results
    for result in results:
        ended = {
            "case": result.case_id,
            "behavior": result.behavior.value,
            "close": result.behavior_close.value,
            "why": f"{result.result} {result.result_close}",
            "received": repr(result.received)[:300],
            "ms": result.duration,
        }
        print(json.dumps(ended))


asyncio.run(main())
