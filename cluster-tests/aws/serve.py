"""Runs moto, a stand-in for the services of AWS, on a free port of loopback until its input closes.

Prints a line with the port, and then one of JSON for each invocation of a function, which nothing runs.
"""

import json
import sys
import threading

from moto.awslambda_simple.models import LambdaSimpleBackend
from moto.core.config import default_user_config
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

TELLING = threading.Lock()


def invoke(backend, function, qualifier, body, headers, response_headers):
    # A function that is not there has an answer of its own.
    backend.get_function(function, qualifier)
    kind = headers.get("X-Amz-Invocation-Type")
    tell({"function": function, "type": kind, "body": body if isinstance(body, str) else body.decode()})
    return b"{}"


def tell(line):
    # Each request has a thread of its own.
    with TELLING:
        print(json.dumps(line), flush=True)


LambdaSimpleBackend.invoke = invoke
default_user_config["lambda"]["use_docker"] = False
server = make_server("127.0.0.1", 0, DomainDispatcherApplication(create_backend_app), threaded=True)
tell({"port": server.port})
threading.Thread(target=server.serve_forever, daemon=True).start()
sys.stdin.read()
