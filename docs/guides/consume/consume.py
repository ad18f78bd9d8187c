# pip install pika; python3 consume.py AMQP_URL QUEUE
import json
import sys
import time

import pika
from pika.exceptions import AMQPConnectionError, ProbableAccessDeniedError, ProbableAuthenticationError


def handle(envelope: dict) -> None:
    for item in envelope["items"]:
        print(envelope["channel"], json.dumps(item.get("data")), flush=True)


def on_message(channel, method, properties, body: bytes) -> None:
    try:
        handle(json.loads(body))
    except Exception as error:
        print("rejected", properties.message_id, repr(error), file=sys.stderr, flush=True)
        # Without requeue: it goes to the dead letters, and would come again and again otherwise.
        channel.basic_reject(method.delivery_tag, requeue=False)
    else:
        # Only now: a message whose worker ends before this goes to another one.
        channel.basic_ack(method.delivery_tag)


def consume(url: str, queue: str) -> None:
    channel = pika.BlockingConnection(pika.URLParameters(url)).channel()
    channel.basic_qos(prefetch_count=10)
    channel.basic_consume(queue, on_message)
    channel.start_consuming()


if __name__ == "__main__":
    while True:
        try:
            consume(*sys.argv[1:3])
        except (ProbableAuthenticationError, ProbableAccessDeniedError):
            raise
        except AMQPConnectionError as error:
            print("connection lost, trying again:", repr(error), file=sys.stderr, flush=True)
        time.sleep(1)
