import { WebSocketServer } from 'ws';

/** A node that says what a test tells it to. `opened(say, socket, number)` is called for each connection, `heard(frame, say)` for each frame. */
export class FakeNode {
  connections = 0;
  frames = [];

  static async start(context, { opened = () => {}, heard = () => {} } = {}) {
    const fake = new FakeNode();
    const server = new WebSocketServer({ host: '127.0.0.1', port: 0 });
    await new Promise((listening) => server.on('listening', listening));
    context.after(() => {
      for (const client of server.clients) client.terminate();
      server.close();
    });
    server.on('connection', (socket) => {
      fake.connections += 1;
      const say = (frame) => socket.readyState === 1 && socket.send(JSON.stringify(frame));
      say({ op: 3, connectionId: `c_${fake.connections}`, connectionKey: 'k', resumed: fake.connections > 1, ...LIMITS });
      socket.on('message', (data) => {
        const frame = JSON.parse(data);
        fake.frames.push(frame);
        heard(frame, say, socket);
      });
      opened(say, socket, fake.connections);
    });
    fake.url = `http://127.0.0.1:${server.address().port}`;
    return fake;
  }
}

const LIMITS = { heartbeatMs: 15_000, resumeWindowMs: 120_000, maxMessageBytes: 65_536, serverTime: Date.now() };
