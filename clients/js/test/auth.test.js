import assert from 'node:assert/strict';
import { createServer } from 'node:http';
import { after, before, test } from 'node:test';

import { Realtime, Rest } from '@fanfare/client';

import { KEY, Node } from './support/node.js';
import { Proxy } from './support/proxy.js';
import { next, until } from './support/wait.js';

const ALL = { '*': ['subscribe', 'publish', 'presence', 'history'] };

let node;
let rest;
before(async () => {
  node = await Node.start();
  rest = new Rest({ url: node.url, key: KEY });
});
after(() => node?.end());

function client(context, options) {
  const made = new Realtime({ url: node.url, reconnectMinMs: 50, reconnectMaxMs: 200, ...options });
  context.after(() => made.close());
  return made;
}

/** A server of the application's. `answer(request, body)` gives what it answers: a status, or what is sent as JSON or as text. */
async function authServer(context, answer) {
  const asked = [];
  const server = createServer(async (request, response) => {
    let body = '';
    for await (const part of request) body += part;
    asked.push({ method: request.method, url: request.url, headers: request.headers, body });
    const given = await answer(request, body);
    if (typeof given === 'number') return response.writeHead(given).end();
    const isText = typeof given === 'string';
    response.writeHead(200, { 'content-type': isText ? 'text/plain' : 'application/json' });
    response.end(isText ? given : JSON.stringify(given));
  });
  await new Promise((listening) => server.listen(0, '127.0.0.1', listening));
  context.after(() => server.close());
  return { url: `http://127.0.0.1:${server.address().port}/auth`, asked };
}

const answers = {
  JWT: () => rest.auth.signToken({ clientId: 'ann', capability: ALL }),
  TokenDetails: () => rest.auth.requestToken({ clientId: 'ann' }),
  TokenRequest: () => rest.auth.createTokenRequest({ clientId: 'ann', capability: ALL }),
};

for (const [kind, answer] of Object.entries(answers)) {
  test(`an auth URL may answer with a ${kind}`, async (context) => {
    const { url, asked } = await authServer(context, answer);
    const one = client(context, { authUrl: url, authHeaders: { 'x-session': 's1' }, authParams: { room: '7' } });
    await one.channels.get('who').presence.enter();
    assert.deepEqual((await one.channels.get('who').presence.get()).map(({ clientId }) => clientId), ['ann']);
    assert.equal(asked[0].url, '/auth?room=7');
    assert.equal(asked[0].headers['x-session'], 's1');
    assert.equal(one.connection.clientId, 'ann');
    await one.channels.get('who').presence.leave();
  });

  test(`an auth callback may give a ${kind}, and is asked on every reconnect`, async (context) => {
    const proxy = await Proxy.to(node.listen);
    context.after(() => proxy.end());
    let asked = 0;
    const authCallback = () => {
      asked += 1;
      return answer();
    };
    const one = client(context, { url: proxy.url, authCallback });
    await next(one.connection, 'connected');
    for (const expected of [2, 3]) {
      proxy.cut();
      await next(one.connection, 'connected');
      assert.equal(asked, expected);
    }
  });
}

test('an auth URL is asked by POST with the client id', async (context) => {
  const { url, asked } = await authServer(context, answers.JWT);
  const one = client(context, { authUrl: url, authMethod: 'POST', clientId: 'ann' });
  await next(one.connection, 'connected');
  assert.deepEqual([asked[0].method, JSON.parse(asked[0].body)], ['POST', { clientId: 'ann' }]);
});

for (const [name, transports] of [
  ['a socket', ['websocket']],
  ['an event stream', ['sse']],
]) {
  test(`tokens that end in the midst of ${name} are replaced without a loss`, async (context) => {
    let asked = 0;
    const authCallback = () => {
      asked += 1;
      return rest.auth.createTokenRequest({ ttl: 4_000, capability: ALL });
    };
    const one = client(context, { authCallback, transports });
    const states = [];
    const heard = [];
    let gaps = 0;
    one.on('discontinuity', () => gaps++);
    await one.channels.get(`ends ${name}`).subscribe(({ data }) => heard.push(data));
    const { id } = one.connection;
    one.connection.on('change', ({ current }) => states.push(current));
    const publisher = rest.channels.get(`ends ${name}`);
    const until3 = Date.now() + 9_000;
    let number = 0;
    while (Date.now() < until3) {
      await publisher.publish('n', number++);
      await new Promise((done) => setTimeout(done, 50));
    }
    await until(() => heard.length === number, 'all messages');
    assert.deepEqual(heard, [...Array(number).keys()]);
    assert.equal(gaps, 0);
    assert.ok(asked >= 3 && asked <= 12, `asked ${asked} times`);
    if (transports[0] === 'websocket') assert.deepEqual([one.connection.id, states], [id, []], 'in place');
  });
}

test('a token that ends and cannot be replaced fails with the reason', async (context) => {
  const token = await rest.auth.signToken({ ttl: 2_000, capability: ALL });
  const one = client(context, { token });
  await next(one.connection, 'connected');
  const { reason } = await next(one.connection, 'failed');
  assert.equal(reason.code, 40142);
});

test('an application that is down is asked again, one that says no is not', async (context) => {
  let given = 500;
  const { url, asked } = await authServer(context, () => given);
  const one = client(context, { authUrl: url });
  const { reason } = await next(one.connection, 'disconnected');
  assert.deepEqual([reason.code, reason.statusCode], [80019, 500]);
  assert.match(reason.message, /authUrl http:.*\/auth: HTTP status 500/);
  given = await rest.auth.signToken({ capability: ALL });
  await next(one.connection, 'connected');
  assert.ok(asked.length >= 2);
  given = 403;
  const refused = client(context, { authUrl: url });
  assert.equal((await next(refused.connection, 'failed')).reason.statusCode, 403);
});

test('revoked tokens are replaced', async (context) => {
  let asked = 0;
  const authCallback = () => {
    asked += 1;
    return rest.auth.requestToken({ clientId: 'eve' });
  };
  const one = client(context, { authCallback });
  await next(one.connection, 'connected');
  const again = next(one.connection, 'connected');
  await rest.auth.revokeTokens({ clientId: 'eve' });
  await again;
  assert.equal(asked, 2);
});

for (const [name, options] of [
  ['a key', () => ({ key: KEY, clientId: 'mallory' })],
  ['tokens', () => ({ authCallback: () => rest.auth.createTokenRequest({ clientId: 'mallory' }) })],
]) {
  test(`a client with ${name} that its account closes does not come back`, async (context) => {
    const one = client(context, options());
    await next(one.connection, 'connected');
    const failed = next(one.connection, 'failed');
    assert.equal(await rest.closeClient('mallory'), 1);
    assert.equal((await failed).reason.code, 40160);
  });
}

test('an answer that is no token is told', async (context) => {
  const one = client(context, { authCallback: () => ({ nothing: true }) });
  const { reason } = await next(one.connection, 'disconnected');
  assert.match(reason.message, /neither a token, TokenDetails nor a TokenRequest/);
});

test('a page in place of a token is told', async (context) => {
  const { url } = await authServer(context, () => '<!doctype html>');
  const { reason } = await next(client(context, { authUrl: url }).connection, 'disconnected');
  assert.match(reason.message, /authUrl .*: the answer of the application holds no token|holds no token/);
  await assert.rejects(rest.auth.signToken({ ttl: 1_000 }), /capability is missing/);
});

test('a client without a connection publishes and reads', async () => {
  const channel = rest.channels.get('rest: über/alles');
  await channel.publish('a', { n: 1 });
  await channel.publish([{ name: 'b', data: 2, id: 'given' }]);
  await channel.publish([{ name: 'b', data: 2, id: 'given' }]);
  const { items } = await channel.history();
  assert.deepEqual(items.map(({ name, data }) => [name, data]), [['b', 2], ['a', { n: 1 }]]);
  assert.deepEqual(await rest.publish([channel.name, '[bad'], { data: 3 }), [
    { channel: channel.name, published: true },
    { channel: '[bad', error: items && (await rest.publish(['[bad'], {}))[0].error, status: 400 },
  ]);
  assert.equal((await channel.occupancy()).connections, 0);
  assert.deepEqual(await channel.presence.get(), []);
  assert.deepEqual((await channel.presence.history()).items, []);
  const rows = await rest.metrics({ window: '1h', aggregate: 'sum' });
  const published = rows.filter(({ kind, nodeId }) => kind === 'publish' && nodeId === '*');
  assert.ok(published.reduce((sum, { count }) => sum + count, 0) >= 3, JSON.stringify(rows));
  assert.equal(typeof (await rest.connections()).connections, 'number');
  assert.ok(Math.abs((await rest.time()) - Date.now()) < 60_000);
  await assert.rejects(rest.queues.list(), { statusCode: 503 });
});

test('errors of HTTP have the status and the reason', async () => {
  const one = new Rest({ url: node.url, key: 'shush.k2' });
  await assert.rejects(one.channels.get('closed').publish('x'), { name: 'FanfareError', code: 40160, statusCode: 403 });
  await assert.rejects(new Rest({ url: node.url, key: 'wrong.k1' }).time(), { code: 40100, statusCode: 401 });
  await assert.rejects(new Rest({ url: 'http://127.0.0.1:1', key: KEY }).time(), { code: 80003 });
  await assert.rejects(new Rest({ url: node.url, token: 'x' }).auth.signToken({ capability: ALL }), /key is missing/);
});
