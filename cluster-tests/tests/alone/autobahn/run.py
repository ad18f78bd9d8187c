"""Runs cases of Autobahn against the address, and writes how each of them ended, one JSON object a line."""

import asyncio
import json
import sys

from kosoku import FailureError, run_fuzzingclient


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
