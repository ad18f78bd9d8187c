// What a node may say, in orders that real nodes seldom choose.
import assert from 'node:assert/strict';
import { after, before, test } from 'node:test';

import { Realtime, Rest } from '@fanfare/client';
import { msgpack } from '@fanfare/client/msgpack';

import { FakeNode } from './support/fake.js';
import { KEY, Node } from './support/node.js';
import { Proxy, withoutWebSocket } from './support/proxy.js';
import { next, until } from './support/wait.js';

let node;
let rest;
before(async () => {
  node = await Node.start();
  rest = new Rest({ url: node.url, key: KEY });
});
after(() => node?.end());

function client(context, url, options = {}) {
  const made = new Realtime({ url, key: KEY, reconnectMinMs: 50, reconnectMaxMs: 200, transports: ['websocket'], ...options });
  context.after(() => made.close());
  return made;
}

/** Attaches and detaches as a node does. */
function answers({ op, id, channel, modes = ['subscribe'] }, say) {
  if (op === 8) say({ op: 9, id, channel, serial: 's', resumed: false, presence: false, modes });
  if (op === 10) say({ op: 11, id, channel });
}

test('a close ends where the node does not answer it', async (context) => {
  const fake = await FakeNode.start(context);
  const one = client(context, fake.url);
  await next(one.connection, 'connected');
  const waiting = assert.rejects(one.channels.get('a').publish('n', 1), { code: 80000 });
  await one.close();
  await waiting;
  assert.equal(one.connection.state, 'closed');
});

test('a connect while the client closes begins when it has closed', async (context) => {
  const one = client(context, node.url);
  await one.channels.get('comes back').subscribe(() => {});
  const closed = one.close();
  one.connect();
  await closed;
  await next(one.connection, 'connected');
  await until(() => one.channels.get('comes back').state === 'attached', 'the channel');
});

test('the node decides when to come back, whatever the platform says', async (context) => {
  const page = new EventTarget();
  Object.assign(globalThis, { addEventListener: page.addEventListener.bind(page), removeEventListener: page.removeEventListener.bind(page) });
  context.after(() => {
    delete globalThis.addEventListener;
    delete globalThis.removeEventListener;
  });
  const fake = await FakeNode.start(context, {
    opened: (say, _, number) => number === 1 && say({ op: 4, code: 50003, error: 'full', reconnectAfterMs: 1_500 }),
  });
  const one = client(context, fake.url);
  const { retryInMs } = await next(one.connection, 'disconnected');
  assert.ok(retryInMs >= 1_500);
  const begun = Date.now();
  for (let storm = 0; storm < 20; storm++) page.dispatchEvent(new Event('online'));
  assert.equal(fake.connections, 1);
  await next(one.connection, 'connected');
  assert.ok(Date.now() - begun >= 1_450, `${Date.now() - begun} ms`);
});

test('a node that sends clients away at once is not asked at once', async (context) => {
  const fake = await FakeNode.start(context, { opened: (say) => say({ op: 4, code: 50003, reconnectAfterMs: 0 }) });
  client(context, fake.url, { reconnectMinMs: 100, reconnectMaxMs: 1_000 });
  await new Promise((done) => setTimeout(done, 2_000));
  assert.ok(fake.connections < 25, `${fake.connections} connections`);
});

test('attach, detach, attach: the last one counts, also later', async (context) => {
  const fake = await FakeNode.start(context, { heard: answers });
  const one = client(context, fake.url);
  const channel = one.channels.get('a');
  channel.on('discontinuity', () => assert.fail('a gap'));
  const first = channel.subscribe(() => {});
  const left = channel.detach();
  const second = channel.attach();
  await Promise.all([first, left, second]);
  assert.equal(channel.state, 'attached');
  assert.deepEqual(fake.frames.map(({ op, modes }) => [op, modes]), [[8, ['subscribe']], [10, undefined], [8, ['subscribe']]]);
});

test('an attach that the node cannot do at the moment is asked for again', async (context) => {
  let refusals = 0;
  const fake = await FakeNode.start(context, {
    heard: (frame, say) => {
      if (frame.op === 8 && refusals++ === 0) return say({ op: 2, id: frame.id, code: 50003, error: 'busy' });
      answers(frame, say);
    },
  });
  const channel = client(context, fake.url).channels.get('a');
  await channel.attach();
  assert.equal(channel.state, 'attached');
});

test('a gap that the node tells unasked is told', async (context) => {
  let speak;
  const fake = await FakeNode.start(context, {
    heard: (frame, say) => {
      speak = say;
      answers(frame, say);
    },
  });
  const channel = client(context, fake.url).channels.get('a');
  await channel.subscribe(() => {});
  const told = next(channel, 'discontinuity');
  speak({ op: 9, channel: 'a', serial: 't', resumed: false, presence: false, modes: ['subscribe'] });
  assert.deepEqual(await told, { channel: 'a' });
});

test('pages of two member lists may come in turns', async (context) => {
  const fake = await FakeNode.start(context, {
    heard: ({ op, id, channel, modes }, say) => {
      if (op !== 8) return;
      say({ op: 9, id, channel, serial: 's', resumed: false, presence: true, modes });
      const page = (of, clientId, more) => say({ op: 14, channel: of, members: [{ clientId, connectionId: 'c', timestamp: 1 }], more });
      if (channel === 'a') return page('a', 'one', true);
      page('b', 'three', true);
      page('a', 'two', false);
      page('b', 'four', false);
    },
  });
  const one = client(context, fake.url);
  const lists = await Promise.all(['a', 'b'].map((name) => one.channels.get(name).presence.get()));
  assert.deepEqual(lists.map((list) => list.map(({ clientId }) => clientId)), [['one', 'two'], ['three', 'four']]);
});

test('a narrower token withholds messages, and a wider one tells the gap', async (context) => {
  const all = { '*': ['subscribe', 'presence'] };
  const grants = [{ '*': ['presence'] }, all, all, all];
  let granted = all;
  const authCallback = () => rest.auth.createTokenRequest({ ttl: 4_000, capability: granted });
  const one = client(context, node.url, { key: undefined, authCallback });
  const channel = one.channels.get('narrow');
  await Promise.all([channel.subscribe(() => {}), channel.presence.get()]);
  granted = grants[0];
  await until(() => !channel.modes.includes('subscribe'), 'the narrower token');
  granted = all;
  const told = next(channel, 'discontinuity');
  await until(async () => {
    await channel.subscribe(() => {});
    return channel.modes.includes('subscribe');
  }, 'the wider token');
  await told;
});

test('a channel that is got again has its past again', async (context) => {
  const one = client(context, node.url);
  for (const number of [0, 1, 2]) await one.channels.get('past').publish('n', number);
  for (let round = 0; round < 2; round++) {
    const heard = [];
    const channel = one.channels.get('again', { rewind: 3 });
    assert.equal(channel.name, 'again');
    await one.channels.release('past');
    const past = one.channels.get('past', { rewind: 3 });
    await past.subscribe(({ data }) => heard.push(data));
    await until(() => heard.length === 3, 'the past');
    assert.deepEqual(heard, [0, 1, 2]);
  }
});

test('the past comes to a channel that was attached for presence', async (context) => {
  const one = client(context, node.url);
  const name = 'presence first';
  for (const number of [0, 1]) await rest.channels.get(name).publish('n', number);
  const channel = one.channels.get(name, { rewind: 2 });
  await channel.presence.get();
  await rest.channels.get(name).publish('n', 2);
  const heard = [];
  await channel.subscribe(({ data }) => heard.push(data));
  await until(() => heard.length === 2, 'the past');
  assert.deepEqual(heard, [1, 2]);
  const other = client(context, node.url).channels.get(name);
  await other.presence.get();
  await rest.channels.get(name).publish('n', 3);
  await other.subscribe(() => {});
  const { items } = await other.history({ untilAttach: true, limit: 1 });
  assert.deepEqual(items.map(({ data }) => data), [3], 'until messages began to come');
});

test('a released channel says so', async (context) => {
  const one = client(context, node.url);
  const channel = one.channels.get('released');
  await channel.attach();
  const waiting = assert.rejects(channel.presence.get());
  await one.channels.release('released');
  await waiting;
  await assert.rejects(channel.subscribe(() => {}), /was released/);
  assert.equal(channel.state, 'detached');
});

test('messages are published as they were', async (context) => {
  const one = client(context, node.url, { autoConnect: false });
  const channel = one.channels.get('by value');
  const data = { number: 0 };
  const published = [];
  for (; data.number < 3; data.number++) published.push(channel.publish('n', data));
  one.connect();
  await Promise.all(published);
  const { items } = await channel.history({ direction: 'forwards' });
  assert.deepEqual(items.map((message) => message.data.number), [0, 1, 2]);
});

test('a request that would end the connection is refused', async (context) => {
  const one = client(context, node.url);
  await assert.rejects(one.channels.get('large').publish('n', 'x'.repeat(600_000)), { code: 40009, statusCode: 413 });
  await assert.rejects(one.channels.get('large').publish('n', 'x'.repeat(100_000)), { code: 40009 });
  await one.channels.get('large').publish('n', 1);
  assert.equal(one.connection.state, 'connected');
});

test('data has the same form in both formats', async (context) => {
  for (const options of [{}, { codec: msgpack }]) {
    const channel = client(context, node.url, options).channels.get('form');
    await channel.publish('n', { date: new Date(5), none: undefined, list: [undefined], big: 2 ** 53 });
    const { items } = await channel.history({ limit: 1 });
    assert.deepEqual(items[0].data, { date: '1970-01-01T00:00:00.005Z', list: [null], big: 2 ** 53 });
  }
});

test('members enter again after a time of event streams', async (context) => {
  const proxy = await Proxy.to(node.listen);
  context.after(() => proxy.end());
  const one = client(context, proxy.url, { transports: ['websocket', 'sse'], clientId: 'ann' });
  const { presence } = one.channels.get('member');
  await one.channels.get('member').subscribe(() => {});
  await presence.enter();
  const open = proxy.filter;
  proxy.filter = withoutWebSocket;
  proxy.cut();
  await until(() => one.connection.state === 'connected' && one.connection.id === undefined, 'an event stream');
  proxy.filter = open;
  // Sockets are tried again where the stream is lost in the midst of its beginning.
  proxy.isOpen = false;
  const lost = next(one.connection, 'disconnected');
  proxy.cut();
  await lost;
  await new Promise((done) => setTimeout(done, 1_000));
  proxy.isOpen = true;
  await until(() => one.connection.id !== undefined && one.connection.state === 'connected', 'a socket');
  await until(async () => (await presence.get()).length === 1, 'the member');
});
