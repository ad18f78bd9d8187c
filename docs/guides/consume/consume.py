# pip install pika; python3 consume.py AMQP_URL QUEUE
import json
import sys

import pika


def handle(envelope: dict) -> None:
    for item in envelope["items"]:
        print(envelope["channel"], json.dumps(item.get("data")), flush=True)


def on_message(channel, method, properties, body: bytes) -> None:
    handle(json.loads(body))
    # Only now: a message whose worker ends before this goes to another one.
    channel.basic_ack(method.delivery_tag)


if __name__ == "__main__":
    url, queue = sys.argv[1:3]
    channel = pika.BlockingConnection(pika.URLParameters(url)).channel()
    channel.basic_qos(prefetch_count=10)
    channel.basic_consume(queue, on_message)
    channel.start_consuming()
