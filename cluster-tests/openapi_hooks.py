"""What the page alone cannot say of a good request: the name of the node's key, the time, a nonce that is new, and ids of queues."""

import base64
import hashlib
import hmac
import itertools
import os
import secrets
import time
import uuid

import schemathesis

SECRET, KEY_NAME = os.environ["OPENAPI_KEY"].rsplit(".", 1)
SIGNED = ("keyName", "ttl", "capability", "clientId", "timestamp", "nonce")
EXAMPLE = "k1"
# Queues and rules that were made, the latest last; every second call that names one names the latest.
QUEUES, RULES = [], []
CALLS = itertools.count()


@schemathesis.hook
def before_call(context, case, kwargs):
    """Makes good what names the key of the page's examples; everything else goes out as it was made."""
    if case.path_parameters.get("keyName") == EXAMPLE:
        case.path_parameters["keyName"] = KEY_NAME
    operation = case.operation.definition.raw.get("operationId")
    is_turn = next(CALLS) % 2 == 1
    if is_turn and "ruleId" in case.path_parameters and RULES:
        case.path_parameters["id"], case.path_parameters["ruleId"] = RULES.pop()
    elif operation == "deleteQueue" and (is_turn or case.path_parameters["id"] in QUEUES):
        # The latest stays, for calls that follow.
        case.path_parameters["id"] = QUEUES.pop(0) if len(QUEUES) > 1 else str(uuid.uuid4())
        RULES[:] = [rule for rule in RULES if rule[0] in QUEUES]
    elif is_turn and "id" in case.path_parameters and QUEUES:
        case.path_parameters["id"] = QUEUES[-1]
    body = case.body
    if is_turn and operation == "putQueue" and isinstance(body, dict) and "name" in body:
        case.body = body = {**body, "name": f"queue-{len(QUEUES)}"}
    if isinstance(body, dict) and body.get("keyName") == EXAMPLE:
        body = {**body, "keyName": KEY_NAME, "timestamp": int(time.time() * 1000), "nonce": secrets.token_hex(16)}
        if "mac" in body:
            text = "".join(f"{body.get(field, '')}\n" for field in SIGNED)
            mac = hmac.new(SECRET.encode(), text.encode(), hashlib.sha256)
            body["mac"] = base64.b64encode(mac.digest()).decode()
        case.body = body


@schemathesis.hook
def after_call(context, case, response):
    operation = case.operation.definition.raw.get("operationId")
    if response.status_code == 200 and operation == "putQueue":
        # A second call with a name edits the queue.
        queue = response.json()["queue"]["id"]
        QUEUES[:] = [other for other in QUEUES if other != queue] + [queue]
    if response.status_code == 200 and operation == "addRule":
        RULES.append((case.path_parameters["id"], response.json()["rule"]["id"]))
    with open(os.environ["OPENAPI_ANSWERS"], "a") as answers:
        answers.write(f"{operation} {response.status_code}\n")
