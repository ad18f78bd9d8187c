// The client in a real browser.
import assert from 'node:assert/strict';
import { after, before, test } from 'node:test';

import { Realtime, Rest } from '@fanfare/client';

import { openBrowser, servePages } from './support/browser.js';
import { Publisher } from './support/load.js';
import { KEY, Node, startCluster } from './support/node.js';
import { Proxy, withoutWebSocket } from './support/proxy.js';
import { until } from './support/wait.js';

/** Longer than a node waits for a silent client. */
const FROZEN_MS = 60_000;

let node;
let rest;
let pages;
let browser;
before(async () => {
  node = await Node.start();
  rest = new Rest({ url: node.url, key: KEY });
  pages = await servePages(rest);
  browser = await openBrowser();
});
after(async () => {
  await browser?.close();
  pages?.server.close();
  await node?.end();
});

/** A page whose client is `fanfare`, and what it heard in `heard`, `gaps` and `states`. */
async function page(context, url, channel, authUrl = '/auth') {
  if (!browser) return context.skip('there is no browser');
  const opened = await browser.newPage();
  context.after(() => opened.close());
  await opened.goto(pages.url);
  await opened.evaluate(
    async ([url, name, authUrl]) => {
      const { Realtime } = await import('/client.js');
      Object.assign(window, { heard: [], gaps: 0, states: [] });
      window.fanfare = new Realtime({ url, authUrl, reconnectMinMs: 50, reconnectMaxMs: 500 });
      window.fanfare.connection.on('change', ({ current }) => window.states.push(current));
      window.fanfare.on('discontinuity', () => window.gaps++);
      window.channel = window.fanfare.channels.get(name);
      await window.channel.subscribe(({ data }) => window.heard.push(data.number));
    },
    [url, channel, authUrl],
  );
  return opened;
}

async function assertComplete(opened, count) {
  await until(async () => (await opened.evaluate('heard.at(-1)')) === count - 1, 'the last message', () => '', 60_000);
  const [heard, gaps] = await opened.evaluate('[heard, gaps]');
  assert.deepEqual(heard, [...Array(count).keys()]);
  assert.equal(gaps, 0);
}

test('a page gets a token, is present, publishes and reads history', async (context) => {
  const opened = await page(context, node.url, 'page');
  if (!opened) return;
  const seen = await opened.evaluate(async () => {
    await channel.presence.enter({ on: 'page' });
    await channel.publish('n', { number: 0 });
    const [member] = await channel.presence.get();
    const { items } = await channel.history();
    return [member.clientId, member.data, items.map(({ data, clientId }) => [data, clientId]), fanfare.connection.id];
  });
  assert.deepEqual(seen.slice(0, 3), ['ann', { on: 'page' }, [[{ number: 0 }, 'ann']]]);
  assert.match(seen[3], /^c_/);
  await assertComplete(opened, 1);
});

test('a page behind a proxy without WebSocket takes event streams', async (context) => {
  const proxy = await Proxy.to(node.listen);
  proxy.filter = withoutWebSocket;
  context.after(() => proxy.end());
  const opened = await page(context, proxy.url, 'page blocked');
  if (!opened) return;
  await opened.evaluate(() => channel.publish('n', { number: 0 }));
  await assertComplete(opened, 1);
});

test('a page goes on after its network was away', async (context) => {
  const opened = await page(context, node.url, 'page offline');
  if (!opened) return;
  const publisher = new Publisher(rest.channels.get('page offline'), 'p', 20);
  await until(async () => (await opened.evaluate('heard.length')) > 10, 'messages');
  await opened.context().setOffline(true);
  // The browser ends no socket by itself; the client finds out by asking.
  await until(() => opened.evaluate("states.includes('disconnected')"), 'the loss');
  await opened.context().setOffline(false);
  await until(() => opened.evaluate("fanfare.connection.state === 'connected'"), 'the connection');
  await assertComplete(opened, await publisher.stop());
});

test('a page that was frozen for a minute misses nothing', async (context) => {
  const opened = await page(context, node.url, 'page frozen');
  if (!opened) return;
  const publisher = new Publisher(rest.channels.get('page frozen'), 'p', 100);
  await until(async () => (await opened.evaluate('heard.length')) > 5, 'messages');
  const devtools = await opened.context().newCDPSession(opened);
  await devtools.send('Page.setWebLifecycleState', { state: 'frozen' });
  await new Promise((done) => setTimeout(done, FROZEN_MS));
  await devtools.send('Page.setWebLifecycleState', { state: 'active' });
  const sofar = publisher.published;
  await until(() => publisher.published > sofar + 10, 'further messages');
  await assertComplete(opened, await publisher.stop());
});

test('tokens of a page that end are replaced in place', async (context) => {
  const opened = await page(context, node.url, 'page expiry', '/auth?ttl=4000');
  if (!opened) return;
  const id = await opened.evaluate('fanfare.connection.id');
  await opened.evaluate('states.length = 0');
  const publisher = new Publisher(rest.channels.get('page expiry'), 'p', 50);
  await new Promise((done) => setTimeout(done, 9_000));
  await assertComplete(opened, await publisher.stop());
  assert.deepEqual(await opened.evaluate('[fanfare.connection.id, states]'), [id, []]);
});

test('a page that is cut off at the balancer misses nothing', async (context) => {
  const proxy = await Proxy.to(node.listen);
  context.after(() => proxy.end());
  const opened = await page(context, proxy.url, 'page cut');
  if (!opened) return;
  const publisher = new Publisher(rest.channels.get('page cut'), 'p', 5);
  for (let cut = 0; cut < 5; cut++) {
    const sofar = publisher.published;
    await until(() => publisher.published > sofar + 20, 'messages');
    await opened.evaluate('states.length = 0');
    proxy.cut();
    await until(() => opened.evaluate("states.at(-1) === 'connected'"), 'the connection');
  }
  await assertComplete(opened, await publisher.stop());
});

test('a page goes on while three nodes drain', async (context) => {
  const nodes = await startCluster(3);
  context.after(() => Promise.all(nodes.map((one) => one.end())));
  const proxy = await Proxy.to(nodes[0].listen);
  context.after(() => proxy.end());
  const opened = await page(context, proxy.url, 'page drain');
  if (!opened) return;
  const writer = new Realtime({ url: nodes[2].url, key: KEY });
  context.after(() => writer.close());
  const publisher = new Publisher(writer.channels.get('page drain'), 'p', 5);
  for (const at of [0, 1]) {
    const sofar = publisher.published;
    await until(() => publisher.published > sofar + 100, 'messages');
    proxy.turnTo(nodes[at + 1].listen);
    await nodes[at].drain();
    await until(() => opened.evaluate("fanfare.connection.state === 'connected'"), 'the connection');
  }
  await assertComplete(opened, await publisher.stop());
});

test('a page whose node is killed goes on with the next', async (context) => {
  const own = await Node.start();
  context.after(() => own.end());
  const opened = await page(context, own.url, 'page killed');
  if (!opened) return;
  const writer = new Realtime({ url: own.url, key: KEY, reconnectMinMs: 50, reconnectMaxMs: 500 });
  context.after(() => writer.close());
  const publisher = new Publisher(writer.channels.get('page killed'), 'p', 5);
  await until(() => publisher.published > 50, 'messages');
  await own.kill();
  await until(() => opened.evaluate("states.includes('disconnected')"), 'the loss');
  await own.restart();
  const sofar = publisher.published;
  await until(() => publisher.published > sofar + 50, 'further messages');
  await assertComplete(opened, await publisher.stop());
});
