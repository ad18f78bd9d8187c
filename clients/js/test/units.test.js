// Parts by themselves.
import assert from 'node:assert/strict';
import { createHmac } from 'node:crypto';
import { test } from 'node:test';

import { Rest } from '@fanfare/client';

import { source } from './support/source.js';

test('pauses grow to their bound and begin anew', async () => {
  const { Backoff } = await source('backoff.ts');
  const backoff = new Backoff(100, 1_000);
  const bounds = [100, 200, 400, 800, 1_000, 1_000];
  for (let round = 0; round < 200; round++) {
    for (const bound of bounds) {
      const pause = backoff.next();
      assert.ok(pause >= 0 && pause <= bound, `${pause} of ${bound}`);
    }
    backoff.reset();
  }
  for (let attempt = 0; attempt < 2_000; attempt++) assert.ok(backoff.next() <= 1_000);
});

test('an id is seen for two minutes of its publisher', async () => {
  const { Seen } = await source('seen.ts');
  const seen = new Seen();
  for (const [id, connectionId, timestamp, expected] of [
    ['a', 'c_1', 1_000, true],
    ['a', 'c_1', 2_000, false],
    ['a', 'c_2', 2_000, true],
    ['b', 'c_1', 120_999, true],
    ['a', 'c_1', 120_999, false],
    ['a', 'c_1', 121_000, true],
    ['a', 'c_1', 122_000, false],
  ]) {
    assert.equal(seen.isNew('room', { id, connectionId, timestamp }), expected, `${id} at ${timestamp}`);
  }
  assert.equal(seen.isNew('other', { id: 'a', connectionId: 'c_1', timestamp: 2_000 }), true);
  seen.forget('room');
  assert.equal(seen.isNew('room', { id: 'a', connectionId: 'c_1', timestamp: 122_000 }), true);
});

test('ids that are remembered have a bound', async () => {
  const { Seen } = await source('seen.ts');
  const seen = new Seen();
  for (let id = 0; id < 200_000; id++) assert.ok(seen.isNew('room', { id: String(id), timestamp: 5 }));
  assert.equal(seen.isNew('room', { id: '199999', timestamp: 5 }), false, 'the latest are there');
  assert.equal(seen.isNew('room', { id: '0', timestamp: 5 }), true, 'the oldest are not');
});

test('a token request is signed by the rule', async () => {
  const rest = new Rest({ url: 'http://localhost', key: 'dot.in.it.k1' });
  const params = { ttl: 60_000, capability: { 'a:*': ['subscribe'] }, clientId: 'ü', timestamp: 5, nonce: 'n'.repeat(16) };
  const { mac, ...signed } = await rest.auth.createTokenRequest(params);
  const capability = '{"a:*":["subscribe"]}';
  assert.deepEqual(signed, { keyName: 'k1', ...params, capability });
  const text = `k1\n60000\n${capability}\nü\n5\n${params.nonce}\n`;
  assert.equal(mac, createHmac('sha256', 'dot.in.it').update(text).digest('base64'));
  const least = await rest.auth.createTokenRequest();
  assert.deepEqual([least.capability, least.clientId, least.ttl], ['', '', 3_600_000]);
  assert.notEqual(least.nonce, (await rest.auth.createTokenRequest()).nonce);
});

test('a JWT has its claims in seconds', async () => {
  const rest = new Rest({ url: 'http://localhost', key: 's.k1', clientId: 'ann' });
  const token = await rest.auth.signToken({ capability: '{}', timestamp: 9_500, ttl: 1_500 });
  const [head, claims, mac] = token.split('.');
  const read = (part) => JSON.parse(Buffer.from(part, 'base64url').toString());
  assert.deepEqual(read(head), { alg: 'HS256', typ: 'JWT', kid: 'k1' });
  assert.deepEqual(read(claims), { iat: 9, exp: 11, 'x-service-capability': '{}', 'x-service-client-id': 'ann' });
  assert.equal(mac, createHmac('sha256', 's').update(`${head}.${claims}`).digest('base64url'));
});

test('requests outlive a connection, and late publishes are unsure', async (context) => {
  const { Requests } = await source('requests.ts');
  const { json } = await source('frame.ts');
  context.mock.timers.enable({ apis: ['Date'] });
  const requests = new Requests(10, json);
  const sent = [];
  const publish = requests.ask({ op: 13, channel: 'a', messages: [] });
  const detach = requests.ask({ op: 10, channel: 'a' });
  requests.linked((frame) => sent.push(frame.id), () => sent.push('first'));
  assert.deepEqual(sent.splice(0), ['first', '1', '2'], 'in their order, after what comes first');
  await assert.rejects(new Requests(10, json).ask({ op: 8, channel: 'a' }, true), { code: 80003 }, 'own ones need a connection');
  const own = requests.ask({ op: 8, channel: 'a' }, true);
  requests.unlinked();
  await assert.rejects(own, { code: 80003 });
  context.mock.timers.tick(60_000);
  requests.linked((frame) => sent.push(frame.id), () => {});
  assert.deepEqual(sent.splice(0), ['3', '1', '2'], 'sent again, but for own ones');
  requests.unlinked();
  context.mock.timers.tick(60_000);
  requests.linked((frame) => sent.push(frame.id), () => {});
  assert.deepEqual(sent.splice(0), ['2'], 'a publish only while the node knows its id');
  await assert.rejects(publish, { code: 50003 });
  assert.ok(requests.answer({ op: 11, id: '2' }));
  assert.equal((await detach).op, 11);
  assert.equal(requests.answer({ op: 1, id: '2' }), false, 'answered once');
});

test('a publish that was sent again and refused for the moment is unsure', async () => {
  const { Requests } = await source('requests.ts');
  const { json } = await source('frame.ts');
  for (const [code, expected] of [[42900, 50003], [40000, 40000]]) {
    const requests = new Requests(10, json);
    const publish = requests.ask({ op: 13, channel: 'a', messages: [] });
    requests.linked(() => {}, () => {});
    requests.unlinked();
    requests.linked(() => {}, () => {});
    requests.answer({ op: 2, id: '1', code, error: 'no' });
    await assert.rejects(publish, { code: expected });
  }
});
