// A balancer before nodes, and what may go wrong on the way.
import { createConnection, createServer } from 'node:net';

/** TCP to one of several addresses. Connections can be cut, and new ones refused. */
export class Proxy {
  #server;
  #sockets = new Set();
  #targets;
  #next = 0;
  isOpen = true;
  /** `filter` may change, hold back or refuse a connection: `(client, upstream) => void`, instead of joining the two. */
  filter = join;

  static async to(...targets) {
    const proxy = new Proxy();
    proxy.#targets = targets;
    proxy.#server = createServer((client) => proxy.#take(client));
    await new Promise((listening) => proxy.#server.listen(0, '127.0.0.1', listening));
    const { port } = proxy.#server.address();
    proxy.url = `http://127.0.0.1:${port}`;
    return proxy;
  }

  turnTo(...targets) {
    this.#targets = targets;
  }

  #take(client) {
    client.on('error', () => {});
    if (!this.isOpen || this.#targets.length === 0) return client.destroy();
    const [host, port] = this.#targets[this.#next++ % this.#targets.length].split(':');
    const upstream = createConnection({ host, port: Number(port) });
    upstream.on('error', () => client.destroy());
    for (const socket of [client, upstream]) {
      this.#sockets.add(socket);
      socket.on('close', () => this.#sockets.delete(socket));
    }
    this.filter(client, upstream);
  }

  /** Lets nothing through on the connections that are there, and ends none. */
  hold() {
    for (const socket of this.#sockets) {
      socket.unpipe();
      socket.pause();
    }
  }

  /** Ends all connections at once, without a word. */
  cut() {
    for (const socket of this.#sockets) socket.destroy();
  }

  end() {
    this.isOpen = false;
    this.#server.close();
    this.cut();
  }
}

function join(client, upstream) {
  client.pipe(upstream).pipe(client);
  client.on('close', () => upstream.destroy());
  upstream.on('close', () => client.destroy());
}

function isUpgrade(head) {
  return /^upgrade: *websocket/im.test(head.toString('latin1'));
}

/** Refuses upgrades to WebSocket, as some proxies do, and lets other requests through. */
export function withoutWebSocket(client, upstream) {
  client.once('data', (first) => {
    if (isUpgrade(first)) {
      client.end('HTTP/1.1 403 Forbidden\r\ncontent-length: 0\r\n\r\n');
      return upstream.destroy();
    }
    upstream.write(first);
    join(client, upstream);
  });
}

/**
 * Cuts, delays and doubles frames of WebSockets between two frames, at random by `random`. `told` counts what was done.
 */
export function unreliable(random, told) {
  return (client, upstream) => {
    client.once('data', (first) => {
      if (!isUpgrade(first)) {
        upstream.write(first);
        return join(client, upstream);
      }
      const end = () => {
        client.destroy();
        upstream.destroy();
      };
      client.on('close', end);
      upstream.on('close', end);
      frames(client, upstream, random, told, end);
      frames(upstream, client, random, told, end);
      client.emit('data', first);
    });
  };
}

function frames(from, to, random, told, end) {
  let bytes = Buffer.alloc(0);
  let isHead = true;
  let waiting = Promise.resolve();
  const send = (frame, isDoubled, delayMs) => {
    waiting = waiting.then(async () => {
      if (delayMs > 0) await new Promise((done) => setTimeout(done, delayMs));
      if (to.destroyed) return;
      to.write(frame);
      if (isDoubled) to.write(frame);
    });
  };
  from.on('data', (data) => {
    bytes = Buffer.concat([bytes, data]);
    if (isHead) {
      const length = bytes.indexOf('\r\n\r\n') + 4;
      if (length < 4) return;
      send(bytes.subarray(0, length), false, 0);
      bytes = bytes.subarray(length);
      isHead = false;
    }
    for (let length; (length = frameLength(bytes)) <= bytes.length; bytes = bytes.subarray(length)) {
      const chance = random();
      if (chance < 0.002) {
        told.cuts += 1;
        return end();
      }
      const isText = (bytes[0] & 0x0f) === 1;
      const isDoubled = isText && chance < 0.02;
      const isLate = chance > 0.98;
      told.doubles += isDoubled ? 1 : 0;
      told.delays += isLate ? 1 : 0;
      send(Buffer.from(bytes.subarray(0, length)), isDoubled, isLate ? random() * 200 : 0);
    }
  });
}

/** The bytes of the first frame; infinity while its head is not there. */
function frameLength(bytes) {
  if (bytes.length < 2) return Infinity;
  const mask = bytes[1] & 0x80 ? 4 : 0;
  const short = bytes[1] & 0x7f;
  if (short < 126) return 2 + mask + short;
  if (short === 126) return bytes.length < 4 ? Infinity : 4 + mask + bytes.readUInt16BE(2);
  return bytes.length < 10 ? Infinity : 10 + mask + Number(bytes.readBigUInt64BE(2));
}

/** Numbers from 0 to 1 that follow from a seed (mulberry32). */
export function randomOf(seed) {
  let state = seed >>> 0;
  return () => {
    state = (state + 0x6d2b79f5) >>> 0;
    let mixed = Math.imul(state ^ (state >>> 15), state | 1);
    mixed ^= mixed + Math.imul(mixed ^ (mixed >>> 7), mixed | 61);
    return ((mixed ^ (mixed >>> 14)) >>> 0) / 2 ** 32;
  };
}
