"""What the page alone cannot say of a good request: the name of the node's key, the time, and a nonce that is new."""

import base64
import hashlib
import hmac
import os
import secrets
import time

import schemathesis

SECRET, KEY_NAME = os.environ["OPENAPI_KEY"].rsplit(".", 1)
SIGNED = ("keyName", "ttl", "capability", "clientId", "timestamp", "nonce")
EXAMPLE = "k1"


@schemathesis.hook
def before_call(context, case, kwargs):
    """Makes good what names the key of the page's examples; everything else goes out as it was made."""
    if case.path_parameters.get("keyName") == EXAMPLE:
        case.path_parameters["keyName"] = KEY_NAME
    body = case.body
    if isinstance(body, dict) and body.get("keyName") == EXAMPLE:
        body = {**body, "keyName": KEY_NAME, "timestamp": int(time.time() * 1000), "nonce": secrets.token_hex(16)}
        if "mac" in body:
            text = "".join(f"{body.get(field, '')}\n" for field in SIGNED)
            mac = hmac.new(SECRET.encode(), text.encode(), hashlib.sha256)
            body["mac"] = base64.b64encode(mac.digest()).decode()
        case.body = body


@schemathesis.hook
def after_call(context, case, response):
    with open(os.environ["OPENAPI_ANSWERS"], "a") as answers:
        answers.write(f"{case.operation.definition.raw.get('operationId')} {response.status_code}\n")
