import assert from 'node:assert/strict';
import { after, before, test } from 'node:test';

import { FanfareError, Realtime, Rest } from '@fanfare/client';
import { msgpack } from '@fanfare/client/msgpack';

import { KEY, Node } from './support/node.js';
import { next, until } from './support/wait.js';

let node;
before(async () => {
  node = await Node.start();
});
after(() => node?.end());

/** A client that is closed with its test. */
function client(context, options = {}) {
  const made = new Realtime({ url: node.url, key: KEY, ...options });
  context.after(() => made.close());
  return made;
}

for (const [name, options] of [
  ['json', {}],
  ['msgpack', { codec: msgpack }],
  ['event stream', { transports: ['sse'] }],
]) {
  test(`publish reaches subscribers over ${name}`, async (context) => {
    const [subscriber, publisher] = [client(context, options), client(context, options)];
    const channel = subscriber.channels.get(`room ${name}`);
    const all = [];
    const named = [];
    await channel.subscribe((message) => all.push(message));
    await channel.subscribe('b', (message) => named.push(message));
    assert.equal(channel.state, 'attached');
    const to = publisher.channels.get(`room ${name}`);
    await to.publish('a', { text: 'grüße', list: [1, null, 2.5] });
    await to.publish([{ name: 'b', data: null }, { id: 'own', extras: { trace: 'x' } }]);
    await until(() => all.length === 3, 'three messages');
    assert.deepEqual(all[0].data, { text: 'grüße', list: [1, null, 2.5] });
    assert.equal(all[1].data, null);
    assert.deepEqual([all[2].id, all[2].name, all[2].data, all[2].extras], ['own', undefined, undefined, { trace: 'x' }]);
    assert.deepEqual(named.map(({ name }) => name), ['b']);
    assert.match(all[0].connectionId, /^c_/);
    assert.ok(Math.abs(all[0].timestamp - Date.now()) < 60_000);
  });

  test(`listeners that are removed hear nothing over ${name}`, async (context) => {
    const one = client(context, options);
    const channel = one.channels.get(`removed ${name}`);
    const heard = [];
    const listener = () => heard.push('removed');
    await channel.subscribe(listener);
    await channel.subscribe('x', (message) => heard.push(message.data));
    channel.unsubscribe(listener);
    await channel.publish('x', 1);
    await until(() => heard.length > 0, 'a message');
    channel.unsubscribe();
    await channel.publish('x', 2);
    await channel.detach();
    assert.equal(channel.state, 'detached');
    await channel.publish('x', 3);
    assert.deepEqual(heard, [1]);
  });

  test(`echo can be switched off over ${name}`, async (context) => {
    const silent = client(context, { ...options, echo: false });
    const other = client(context);
    const heard = [];
    await silent.channels.get(`echo ${name}`).subscribe(({ data }) => heard.push(data));
    await silent.channels.get(`echo ${name}`).publish('x', 'own');
    await other.channels.get(`echo ${name}`).publish('x', 'foreign');
    await until(() => heard.length > 0, 'a message');
    assert.deepEqual(heard, ['foreign']);
  });
}

test('rewind gives what was published before', async (context) => {
  const one = client(context);
  for (const number of [1, 2, 3]) await one.channels.get('rewound').publish('n', number);
  const heard = [];
  const channel = client(context).channels.get('rewound', { rewind: 2 });
  await channel.subscribe(({ data }) => heard.push(data));
  await until(() => heard.length === 2, 'two messages');
  assert.deepEqual(heard, [2, 3]);
});

test('history pages and ends where the channel was attached', async (context) => {
  const channel = client(context).channels.get('past');
  for (let number = 0; number < 5; number++) await channel.publish('n', number);
  await channel.attach();
  await channel.publish('n', 'later');
  const page = await channel.history({ limit: 2, untilAttach: true });
  assert.deepEqual(page.items.map(({ data }) => data), [4, 3]);
  assert.equal(page.hasNext, true);
  const all = [];
  for await (const { data } of page) all.push(data);
  assert.deepEqual(all, [4, 3, 2, 1, 0]);
  const forwards = await channel.history({ direction: 'forwards' });
  assert.deepEqual(forwards.items.map(({ data }) => data), [0, 1, 2, 3, 4, 'later']);
  assert.equal(await forwards.next(), undefined);
});

test('members enter, change and leave', async (context) => {
  const [ann, bob] = [client(context, { clientId: 'ann' }), client(context, { clientId: 'bob' })];
  const events = [];
  await ann.channels.get('hall').presence.enter({ mood: 'well' });
  const { presence } = bob.channels.get('hall');
  await presence.subscribe(({ action, clientId, data }) => events.push([action, clientId, data]));
  assert.deepEqual((await presence.get()).map(({ clientId }) => clientId), ['ann']);
  await presence.enter();
  await ann.channels.get('hall').presence.update({ mood: 'better' });
  await presence.leave();
  await until(() => events.length === 4, 'four events');
  assert.deepEqual(events, [
    ['present', 'ann', { mood: 'well' }],
    ['enter', 'bob', undefined],
    ['update', 'ann', { mood: 'better' }],
    ['leave', 'bob', undefined],
  ]);
  assert.deepEqual((await presence.get()).map(({ data }) => data), [{ mood: 'better' }]);
  await ann.close();
  await until(() => events.length === 5, 'the end of a client');
  assert.deepEqual(presence.members, []);
});

test('an event stream tells who is present and cannot enter', async (context) => {
  const one = client(context, { transports: ['sse'], clientId: 'ann' });
  await client(context).channels.get('watched').presence.enterClient('bob', 1);
  const { presence } = one.channels.get('watched');
  assert.deepEqual((await presence.get()).map(({ clientId, data }) => [clientId, data]), [['bob', 1]]);
  await assert.rejects(presence.enter(), { code: 40000 });
});

test('further channels of an event stream lose nothing of the first', async (context) => {
  const one = client(context, { transports: ['sse'] });
  const heard = [];
  let gaps = 0;
  one.on('discontinuity', () => gaps++);
  const first = one.channels.get('stream 0');
  await first.subscribe(({ data }) => heard.push(data));
  const publisher = client(context).channels.get('stream 0');
  let number = 0;
  for (let count = 1; count < 10; count++) {
    const attached = one.channels.get(`stream ${count}`).attach();
    for (let several = 0; several < 5; several++) await publisher.publish('n', number++);
    await attached;
  }
  await until(() => heard.length >= number, 'all messages');
  assert.deepEqual(heard, [...Array(number).keys()]);
  assert.equal(gaps, 0);
});

test('an event stream refuses single channels and goes on', async (context) => {
  const one = client(context, { transports: ['sse'], key: 'shush.k2' });
  const heard = [];
  await one.channels.get('open:a').subscribe(({ data }) => heard.push(data));
  const [good, bad] = [one.channels.get('open:b'), one.channels.get('shut')];
  const attached = good.attach();
  await assert.rejects(bad.attach(), { code: 40160 });
  await attached;
  assert.deepEqual([good.state, bad.state], ['attached', 'failed']);
  const writer = client(context);
  await writer.channels.get('open:a').publish('n', 1);
  await until(() => heard.length === 1, 'a message');
  const many = Array.from({ length: 18 }, (_, number) => one.channels.get(`open:${number}`).attach());
  await Promise.all(many);
  await assert.rejects(one.channels.get('open:more').attach(), { code: 42900, reason: 'channel_limit' });
  await writer.channels.get('open:a').publish('n', 2);
  await until(() => heard.length === 2, 'another message');
});

test('data without a form in JSON is refused, and hurts nothing', async (context) => {
  const one = client(context, { autoConnect: false });
  const channel = one.channels.get('no form');
  const bad = channel.publish('n', 1n);
  const good = channel.publish('n', 1);
  one.connect();
  await assert.rejects(bad, { code: 40000 });
  await good;
  await assert.rejects(channel.publish('n', { toJSON: () => assert.fail('no form') }), { code: 40000 });
});

test('an attach right after a detach is a first one', async (context) => {
  const one = client(context);
  one.on('discontinuity', () => assert.fail('a gap'));
  const channel = one.channels.get('again');
  for (let round = 0; round < 5; round++) {
    await channel.attach();
    const detached = channel.detach();
    await channel.attach();
    await detached;
    assert.equal(channel.state, 'attached');
  }
  const leaving = one.channels.get('leaving');
  const attached = leaving.attach();
  await leaving.detach();
  await attached;
  assert.equal(leaving.state, 'detached');
});

test('a client that is closed and opened at once has one connection', async (context) => {
  let asked = 0;
  const rest = new Rest({ url: node.url, key: KEY });
  const authCallback = async () => {
    asked += 1;
    await new Promise((done) => setTimeout(done, 50));
    return rest.auth.createTokenRequest();
  };
  const one = client(context, { key: undefined, authCallback });
  await one.close();
  one.connect();
  await one.close();
  one.connect();
  await next(one.connection, 'connected');
  assert.ok(asked <= 3);
  const heard = [];
  await one.channels.get('once').subscribe(({ data }) => heard.push(data));
  await one.channels.get('once').publish('n', 1);
  await until(() => heard.length > 0, 'the message');
  assert.deepEqual([heard, one.connection.state], [[1], 'connected']);
});

test('occupancy is told', async (context) => {
  const channel = client(context).channels.get('counted', { occupancy: true });
  const told = next(channel, 'occupancy');
  await channel.attach();
  const { connections, source } = await told;
  assert.deepEqual([connections, source], [1, 'cluster']);
});

test('states come in order, and a closed client can connect again', async (context) => {
  const one = client(context, { autoConnect: false });
  const states = [];
  one.connection.on('change', ({ current }) => states.push(current));
  assert.equal(one.connection.state, 'initialized');
  const waits = one.channels.get('later').publish('x', 1);
  one.connect();
  await waits;
  assert.match(one.connection.id, /^c_/);
  await one.close();
  await assert.rejects(one.channels.get('later').publish('x', 1), { code: 80000 });
  one.connect();
  await next(one.connection, 'connected');
  assert.deepEqual(states, ['connecting', 'connected', 'closing', 'closed', 'connecting', 'connected']);
});

test('a wrong key fails once and for all', async (context) => {
  const one = client(context, { key: 'wrong.k1' });
  const { reason } = await next(one.connection, 'failed');
  assert.ok(reason instanceof FanfareError);
  assert.deepEqual([reason.code, reason.statusCode], [40100, 401]);
  await assert.rejects(one.channels.get('x').attach(), { code: 80000, message: 'the client has failed: unauthorized' });
  const nobody = client(context, { key: undefined });
  assert.match((await next(nobody.connection, 'failed')).reason.message, /give key, token, authUrl or authCallback/);
});

test('a channel beyond the capability fails with the reason', async (context) => {
  const one = client(context, { key: 'shush.k2' });
  const channel = one.channels.get('secret');
  const failed = next(channel, 'failed');
  await assert.rejects(channel.attach(), { code: 40160, statusCode: 403 });
  assert.equal((await failed).code, 40160);
  assert.equal(channel.state, 'failed');
  const open = one.channels.get('open:1');
  await open.attach();
  assert.deepEqual(open.modes, ['subscribe']);
  await assert.rejects(open.presence.get(), { code: 40160 });
});

test('messages are checked before they wait', async (context) => {
  const channel = client(context).channels.get('checked');
  await assert.rejects(channel.publish({ event: 'x' }), /a message has no field event/);
  await assert.rejects(channel.publish(), /a message is an object/);
  await assert.rejects(channel.publish([undefined]), { code: 40000 });
});

test('a client that cannot connect says where, once', async (context) => {
  const warned = context.mock.method(console, 'warn', () => {});
  const one = client(context, { url: 'http://127.0.0.1:1', reconnectMinMs: 10, reconnectMaxMs: 20 });
  const { reason } = await next(one.connection, 'disconnected');
  assert.match(reason.message, /cannot connect to http:\/\/127.0.0.1:1/);
  await next(one.connection, 'disconnected');
  assert.equal(warned.mock.callCount(), 1);
});

test('a listener that fails keeps no other from its message', async (context) => {
  const told = context.mock.method(console, 'error', () => {});
  const channel = client(context).channels.get('failing');
  const heard = [];
  await channel.subscribe(() => {
    throw new Error('at once');
  });
  await channel.subscribe(async () => {
    throw new Error('later');
  });
  await channel.subscribe(({ data }) => heard.push(data));
  await channel.publish('x', 1);
  await until(() => heard.length === 1 && told.mock.callCount() === 2, 'the message and two reports');
});

test('a client that closes waits for the answers to what it sent', async (context) => {
  const one = client(context);
  await next(one.connection, 'connected');
  const published = [1, 2, 3].map((number) => one.channels.get('last words').publish('n', number));
  await one.close();
  await Promise.all(published);
});

test('options are checked', () => {
  for (const [options, told] of [
    [{}, /url/],
    [{ url: 'nowhere' }, /url is no address: nowhere/],
    [{ url: 'ftp://x' }, /url must begin/],
    [{ url: 'http://x?key=a' }, /neither a query/],
    [{ url: 'http://x', key: 'a.b', token: 'c' }, /one credential is enough: key, token/],
    [{ url: 'http://x', key: 'nodot' }, /key must be/],
    [{ url: 'http://x', key: 'a.b\n' }, /key has white space/],
    [{ url: 'http://x', clientID: 'a' }, /there is no option clientID/],
  ]) {
    assert.throws(() => new Realtime(options), (error) => error.code === 40000 && told.test(error.message));
    assert.throws(() => new Rest(options), { code: 40000 });
  }
  for (const [options, told] of [
    [{ transports: ['ws'] }, /transports/],
    [{ codec: 'msgpack' }, /codec/],
  ]) {
    assert.throws(() => new Realtime({ url: 'http://x', ...options }), (error) => error.code === 40000 && told.test(error.message));
  }
});
