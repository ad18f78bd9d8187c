import assert from 'node:assert/strict';
import { spawn } from 'node:child_process';
import { after, before, test } from 'node:test';

import { Realtime } from '@fanfare/client';

import { Publisher, Recorder } from './support/load.js';
import { KEY, Node, startCluster } from './support/node.js';
import { Proxy, withoutWebSocket } from './support/proxy.js';
import { next, until } from './support/wait.js';

const SOON = { reconnectMinMs: 50, reconnectMaxMs: 500 };

function client(context, url, options = {}) {
  const made = new Realtime({ url, key: KEY, ...SOON, ...options });
  context.after(() => made.close());
  return made;
}

let node;
before(async () => {
  node = await Node.start();
});
after(() => node?.end());

for (const [name, transports] of [
  ['sockets', ['websocket']],
  ['event streams', ['sse']],
]) {
  test(`connections cut at the balancer lose nothing over ${name}`, async (context) => {
    const proxy = await Proxy.to(node.listen);
    context.after(() => proxy.end());
    const subscriber = client(context, proxy.url, { transports });
    const channel = subscriber.channels.get(`cut ${name}`);
    const recorder = new Recorder(channel);
    await channel.attach();
    const publishing = client(context, proxy.url, { transports }).channels.get(`cut ${name}`);
    const publisher = new Publisher(publishing, 'p');
    for (let cut = 0; cut < 5; cut++) {
      const sofar = publisher.published;
      await until(() => publisher.published > sofar + 20, 'messages');
      proxy.cut();
      await next(subscriber.connection, 'connected');
    }
    const count = await publisher.stop();
    await until(() => recorder.heard.get('p')?.last === count - 1, 'the last message', () => String(recorder.faults));
    recorder.assertComplete(count, ['p']);
    assert.equal(recorder.gaps, 0);
  });
}

test('a restart of the node loses nothing and keeps members', async (context) => {
  const own = await Node.start();
  context.after(() => own.end());
  const [one, two] = [client(context, own.url, { clientId: 'ann' }), client(context, own.url)];
  const channel = one.channels.get('restarted');
  const recorder = new Recorder(channel);
  await channel.attach();
  await channel.presence.enter('here');
  const events = [];
  const seen = two.channels.get('restarted').presence;
  await seen.subscribe(({ action, clientId }) => events.push(`${action} ${clientId}`));
  await seen.get();
  const publisher = new Publisher(two.channels.get('restarted'), 'p');
  await until(() => publisher.published > 50, 'messages');
  for (const each of [one, two]) each.on('discontinuity', ({ channel }) => assert.fail(`a gap in ${channel}`));
  await own.kill();
  await next(one.connection, 'disconnected');
  await own.restart();
  await until(() => one.connection.state === 'connected' && two.connection.state === 'connected', 'both are back');
  const sofar = publisher.published;
  await until(() => publisher.published > sofar + 50, 'further messages');
  const count = await publisher.stop();
  await until(() => recorder.heard.get('p')?.last === count - 1, 'the last message', () => String(recorder.faults));
  recorder.assertComplete(count, ['p']);
  assert.deepEqual((await seen.get()).map(({ clientId }) => clientId), ['ann']);
  assert.deepEqual(events, ['present ann']);
});

test('publishes without a connection wait for one and are published once', async (context) => {
  const proxy = await Proxy.to(node.listen);
  context.after(() => proxy.end());
  const one = client(context, proxy.url);
  const channel = one.channels.get('offline');
  const heard = [];
  await channel.subscribe(({ data }) => heard.push(data));
  proxy.isOpen = false;
  proxy.cut();
  await next(one.connection, 'disconnected');
  const waiting = [1, 2, 3].map((number) => channel.publish('n', number));
  proxy.isOpen = true;
  await Promise.all(waiting);
  await until(() => heard.length >= 3, 'three messages');
  const { items } = await channel.history({ direction: 'forwards' });
  assert.deepEqual([heard, items.map(({ data }) => data)], [[1, 2, 3], [1, 2, 3]]);
});

test('the queue of requests has a bound', async (context) => {
  const one = client(context, 'http://127.0.0.1:1', { queueMax: 2 });
  const channel = one.channels.get('full');
  const waiting = [channel.publish('n', 1), channel.publish('n', 2)];
  await assert.rejects(channel.publish('n', 3), { code: 42900 });
  const ends = waiting.map((one) => assert.rejects(one, { code: 80000 }));
  await one.close();
  await Promise.all(ends);
});

test('a channel of a store that has forgotten tells the gap', async (context) => {
  const forgetful = await Node.start({ FANFARE_STORE: 'none' });
  context.after(() => forgetful.end());
  const one = client(context, forgetful.url);
  const channel = one.channels.get('gap');
  const told = [];
  one.on('discontinuity', (event) => told.push(event));
  channel.on('discontinuity', (event) => told.push(event));
  await channel.subscribe(() => {});
  await forgetful.kill();
  // The client may be back before the restart is seen here.
  const attached = next(channel, 'attached');
  await forgetful.restart();
  await attached;
  assert.deepEqual(told, [{ channel: 'gap' }, { channel: 'gap' }]);
  await channel.detach();
  await channel.attach();
  assert.equal(told.length, 2, 'an attach of the application is no gap');
});

test('a gap that is not listened to is told on the console', async (context) => {
  const forgetful = await Node.start({ FANFARE_STORE: 'none' });
  context.after(() => forgetful.end());
  const warned = context.mock.method(console, 'warn', () => {});
  const channel = client(context, forgetful.url).channels.get('unheard');
  await channel.attach();
  await forgetful.kill();
  // The client may be back before the restart is seen here.
  const attached = next(channel, 'attached');
  await forgetful.restart();
  await attached;
  assert.match(String(warned.mock.calls[0]?.arguments[0]), /messages of unheard may be missing/);
});

test('where WebSocket is blocked a client takes event streams', async (context) => {
  const proxy = await Proxy.to(node.listen);
  proxy.filter = withoutWebSocket;
  context.after(() => proxy.end());
  const one = client(context, proxy.url);
  const heard = [];
  const channel = one.channels.get('blocked');
  await channel.subscribe(({ data }) => heard.push(data));
  await channel.publish('n', 1);
  await until(() => heard.length === 1, 'a message');
  assert.equal(one.connection.id, undefined, 'an event stream has no connection id to publish by');
});

test('three nodes that drain one after another lose nothing and tell no gap', async (context) => {
  const nodes = await startCluster(3);
  context.after(() => Promise.all(nodes.map((one) => one.end())));
  const proxy = await Proxy.to(...nodes.map(({ listen }) => listen));
  context.after(() => proxy.end());
  const subscribers = Array.from({ length: 6 }, () => client(context, proxy.url));
  const recorders = subscribers.map((one) => new Recorder(one.channels.get('drained')));
  await Promise.all(subscribers.map((one) => one.channels.get('drained').attach()));
  const publishers = ['p', 'q'].map((name) => new Publisher(client(context, proxy.url).channels.get('drained'), name));
  for (const drained of nodes.slice(0, 2)) {
    const sofar = publishers[0].published;
    await until(() => publishers[0].published > sofar + 100, 'messages');
    proxy.turnTo(...nodes.filter((one) => one !== drained && one.isDrained !== true).map(({ listen }) => listen));
    drained.isDrained = true;
    await drained.drain();
  }
  const sofar = publishers[0].published;
  await until(() => publishers[0].published > sofar + 100, 'messages');
  const counts = await Promise.all(publishers.map((publisher) => publisher.stop()));
  for (const recorder of recorders) {
    for (const [at, name] of ['p', 'q'].entries()) {
      await until(() => recorder.heard.get(name)?.last === counts[at] - 1, 'the last message', () => String(recorder.faults));
    }
    assert.deepEqual([recorder.faults, recorder.gaps], [[], 0]);
  }
});

test('a node that says nothing any more is left', async (context) => {
  const quick = await Node.start({ FANFARE_LIMITS_HEARTBEAT_MS: '500' });
  context.after(() => quick.end());
  const proxy = await Proxy.to(quick.listen);
  context.after(() => proxy.end());
  const one = client(context, proxy.url, { transports: ['websocket'] });
  const recorder = new Recorder(one.channels.get('silent'));
  await one.channels.get('silent').attach();
  proxy.hold();
  const publisher = new Publisher(client(context, quick.url).channels.get('silent'), 'p', 50);
  const { reason } = await next(one.connection, 'disconnected');
  assert.match(reason.message, /silent for too long/);
  await next(one.connection, 'connected');
  const count = await publisher.stop();
  await until(() => recorder.heard.get('p')?.last === count - 1, 'the last message');
  recorder.assertComplete(count, ['p']);
  assert.equal(recorder.gaps, 0);
});

test('a process that slept asks whether its node is there', async (context) => {
  const quick = await Node.start({ FANFARE_LIMITS_HEARTBEAT_MS: '1000' });
  context.after(() => quick.end());
  // The node gives a silent client up after twice the heartbeat and ten seconds.
  const program = `
    import { Realtime } from '@fanfare/client';
    const client = new Realtime({ url: process.env.FANFARE_URL, key: process.env.FANFARE_KEY, reconnectMinMs: 50 });
    client.connection.on('change', ({ current, reason }) => console.log('state', current, reason?.message ?? ''));
    client.on('discontinuity', () => console.log('gap'));
    await client.channels.get('slept').subscribe(({ data }) => console.log('heard', data.number));
  `;
  const environment = { ...process.env, FANFARE_URL: quick.url, FANFARE_KEY: KEY };
  const child = spawn(process.execPath, ['--input-type=module', '-e', program], { env: environment, cwd: import.meta.dirname });
  context.after(() => child.kill('SIGKILL'));
  let told = '';
  child.stdout.on('data', (data) => (told += data));
  const heard = () => [...told.matchAll(/^heard (\d+)$/gm)].map(([, number]) => Number(number));
  const publisher = new Publisher(client(context, quick.url).channels.get('slept'), 'p', 50);
  await until(() => heard().length > 5, 'messages', () => told);
  child.kill('SIGSTOP');
  await new Promise((done) => setTimeout(done, 16_000));
  child.kill('SIGCONT');
  const sofar = publisher.published;
  await until(() => publisher.published > sofar + 20, 'further messages');
  const count = await publisher.stop();
  await until(() => heard().at(-1) === count - 1, 'the last message', () => told);
  const all = heard();
  assert.deepEqual(all, Array.from({ length: count - all[0] }, (_, at) => all[0] + at));
  assert.doesNotMatch(told, /^gap$/m);
  assert.match(told, /state disconnected/);
});

test('a client comes back when the node asked for it', async (context) => {
  const nodes = await startCluster(2);
  context.after(() => Promise.all(nodes.map((one) => one.end())));
  const proxy = await Proxy.to(nodes[1].listen);
  context.after(() => proxy.end());
  const one = client(context, proxy.url);
  await next(one.connection, 'connected');
  // Long enough for the node to be taken at its word.
  await new Promise((done) => setTimeout(done, 10_500));
  proxy.turnTo(nodes[0].listen);
  const told = next(one.connection, 'disconnected');
  const ended = nodes[1].drain();
  const { retryInMs, reason } = await told;
  assert.equal(reason.code, 50003);
  const begun = Date.now();
  await next(one.connection, 'connected');
  assert.ok(Date.now() - begun >= retryInMs - 5, `${Date.now() - begun} of ${retryInMs}`);
  await ended;
});

test('no listener and no timer is left of a client that is closed', async (context) => {
  const page = new EventTarget();
  const counts = new Map();
  for (const change of ['addEventListener', 'removeEventListener']) {
    globalThis[change] = (name, listener) => {
      page[change](name, listener);
      counts.set(name, (counts.get(name) ?? 0) + (change === 'addEventListener' ? 1 : -1));
    };
  }
  context.after(() => {
    delete globalThis.addEventListener;
    delete globalThis.removeEventListener;
  });
  for (let round = 0; round < 5; round++) {
    const one = new Realtime({ url: node.url, key: KEY });
    await one.channels.get('leak').subscribe(() => {});
    await one.close();
  }
  assert.deepEqual([...counts.values()], [0, 0, 0]);
});
