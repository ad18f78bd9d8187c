# FANFARE_KEY=<secret>.<keyName> python3 token_request.py [CLIENT_ID] [CAPABILITY]
import base64
import hashlib
import hmac
import json
import os
import secrets
import sys
import time


def token_request(key: str, client_id: str = "", capability: str = "") -> dict:
    """A request for a token that lasts an hour. An empty capability asks for everything that the key allows."""
    secret, _, key_name = key.rpartition(".")
    if not secret:
        raise ValueError("FANFARE_KEY must be <secret>.<keyName>")
    request = {
        "keyName": key_name,
        "ttl": 60 * 60 * 1000,
        "capability": capability,
        "clientId": client_id,
        "timestamp": int(time.time() * 1000),
        "nonce": secrets.token_hex(16),
    }
    # A dict keeps its order, which is the order of the signed text.
    text = "".join(f"{value}\n" for value in request.values())
    digest = hmac.new(secret.encode(), text.encode(), hashlib.sha256).digest()
    return {**request, "mac": base64.b64encode(digest).decode()}


if __name__ == "__main__":
    print(json.dumps(token_request(os.environ.get("FANFARE_KEY", ""), *sys.argv[1:3])))
