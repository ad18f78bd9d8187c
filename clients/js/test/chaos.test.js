// Frames that are cut off, delayed and doubled at random between client and node, for a minute and by 20 seeds.
import assert from 'node:assert/strict';
import { after, before, describe, test } from 'node:test';

import { Realtime, Rest } from '@fanfare/client';

import { openBrowser, servePages } from './support/browser.js';
import { Publisher, Recorder } from './support/load.js';
import { KEY, Node } from './support/node.js';
import { Proxy, randomOf, unreliable } from './support/proxy.js';
import { until } from './support/wait.js';

const SEEDS = 20;
const CHAOS_MS = 60_000;

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

function client(context, url) {
  const made = new Realtime({ url, key: KEY, reconnectMinMs: 50, reconnectMaxMs: 200 });
  context.after(() => made.close());
  return made;
}

describe('frames cut, delayed and doubled at random: nothing lost or doubled in silence', { concurrency: 2 }, () => {
  test('in Node', async (context) => {
    const told = { cuts: 0, doubles: 0, delays: 0 };
    const courses = Array.from({ length: SEEDS }, async (_, seed) => {
      const proxy = await Proxy.to(node.listen);
      proxy.filter = unreliable(randomOf(seed), told);
      context.after(() => proxy.end());
      const channel = client(context, proxy.url).channels.get(`chaos ${seed}`);
      const recorder = new Recorder(channel);
      const publisher = new Publisher(client(context, proxy.url).channels.get(`chaos ${seed}`), 'p', 10);
      await channel.attach();
      await new Promise((done) => setTimeout(done, CHAOS_MS));
      const count = await publisher.stop();
      await until(() => recorder.heard.get('p')?.last === count - 1, 'the last message', () => `seed ${seed}: ${recorder.faults}`);
      // A subscriber that attaches after the first messages may begin anywhere.
      assert.deepEqual(recorder.faults.slice(recorder.heard.get('p').all.has(0) ? 0 : 1), [], `seed ${seed}`);
      return recorder.gaps;
    });
    const gaps = await Promise.all(courses);
    context.diagnostic(`${JSON.stringify(told)}, gaps told: ${gaps.reduce((sum, one) => sum + one, 0)}`);
    assert.ok(told.cuts > 0 && told.doubles > 0 && told.delays > 0, JSON.stringify(told));
  });

  test('in a browser', async (context) => {
    if (!browser) return context.skip('there is no browser');
    const told = { cuts: 0, doubles: 0, delays: 0 };
    const opened = await browser.newPage();
    context.after(() => opened.close());
    await opened.goto(pages.url);
    const urls = [];
    for (let seed = 0; seed < SEEDS; seed++) {
      const proxy = await Proxy.to(node.listen);
      proxy.filter = unreliable(randomOf(1_000 + seed), told);
      context.after(() => proxy.end());
      urls.push(proxy.url);
    }
    await opened.evaluate(async (urls) => {
      const { Realtime } = await import('/client.js');
      window.all = urls.map(() => ({ heard: [], gaps: 0 }));
      const attaching = urls.map((url, seed) => {
        const client = new Realtime({ url, authUrl: '/auth', reconnectMinMs: 50, reconnectMaxMs: 200 });
        client.on('discontinuity', () => window.all[seed].gaps++);
        return client.channels.get(`page ${seed}`).subscribe(({ data }) => window.all[seed].heard.push(data.number));
      });
      await Promise.all(attaching);
    }, urls);
    const publishers = urls.map((_, seed) => new Publisher(rest.channels.get(`page ${seed}`), 'p', 20));
    await new Promise((done) => setTimeout(done, CHAOS_MS));
    const counts = await Promise.all(publishers.map((publisher) => publisher.stop()));
    const last = () => opened.evaluate('all.map(({ heard }) => heard.at(-1) + 1)');
    await until(async () => String(await last()) === String(counts), 'the last messages', () => '', 60_000);
    const all = await opened.evaluate('all');
    for (const [seed, { heard, gaps }] of all.entries()) {
      if (gaps === 0) assert.deepEqual(heard, [...Array(counts[seed]).keys()], `seed ${seed}`);
    }
    context.diagnostic(`${JSON.stringify(told)}, gaps told: ${all.reduce((sum, { gaps }) => sum + gaps, 0)}`);
    assert.ok(told.cuts > 0 && told.doubles > 0 && told.delays > 0, JSON.stringify(told));
  });
});
