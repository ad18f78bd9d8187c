# python3 verify.py SECRET TIMESTAMP SIGNATURE < body
import hashlib
import hmac
import sys
import time


def is_from_fanfare(secret: str, timestamp: str, signature: str, body: bytes) -> bool:
    """`body` holds the bytes that were received, before any parser."""
    if not (timestamp.isascii() and timestamp.isdigit()):
        return False
    if abs(time.time() * 1000 - int(timestamp)) > 5 * 60 * 1000:
        return False
    digest = hmac.new(secret.encode(), timestamp.encode() + b"." + body, hashlib.sha256).hexdigest()
    return hmac.compare_digest(f"v1={digest}".encode(), signature.encode())


if __name__ == "__main__":
    print("verified" if is_from_fanfare(*sys.argv[1:4], sys.stdin.buffer.read()) else "refused")
