// The hooks in React, in a real browser and in strict mode, which mounts each component twice.
import assert from 'node:assert/strict';
import { join } from 'node:path';
import { after, before, test } from 'node:test';

import { Realtime, Rest } from '@fanfare/client';
import { build } from 'esbuild';

import { openBrowser, servePages } from './support/browser.js';
import { KEY, Node } from './support/node.js';
import { until } from './support/wait.js';

let node;
let rest;
let pages;
let browser;
before(async () => {
  node = await Node.start();
  rest = new Rest({ url: node.url, key: KEY });
  const { outputFiles } = await build({
    entryPoints: [join(import.meta.dirname, 'support/app.jsx')],
    bundle: true,
    write: false,
    jsx: 'automatic',
    define: { 'process.env.NODE_ENV': '"development"' },
  });
  pages = await servePages(rest, { '/app.js': outputFiles[0].text });
  browser = await openBrowser();
});
after(async () => {
  await browser?.close();
  pages?.server.close();
  await node?.end();
});

test('components in strict mode attach, enter and leave once', async (context) => {
  if (!browser) return context.skip('there is no browser');
  const opened = await browser.newPage();
  context.after(() => opened.close());
  const errors = [];
  opened.on('pageerror', (error) => errors.push(String(error)));
  opened.on('console', (message) => ['error', 'warning'].includes(message.type()) && errors.push(message.text()));
  const watcher = new Realtime({ url: node.url, key: KEY });
  context.after(() => watcher.close());
  const events = [];
  for (const name of ['one', 'two']) {
    await watcher.channels.get(name).presence.subscribe(({ action, data }) => events.push(`${action} ${name} ${data?.mood}`));
  }
  await opened.goto(pages.url);
  await opened.addScriptTag({ url: '/app.js' });
  await opened.evaluate((url) => window.begin(url), node.url);
  const room = async () => JSON.parse(await opened.textContent('#room'));
  const shows = (what, holds) => until(async () => holds(await room()), what);

  await shows('an attached channel with its member', ({ state, names }) => state === 'attached' && names[0] === 'ann:well');
  assert.equal(await opened.textContent('#state'), 'connected');
  await opened.evaluate(() => window.publish('n', 1));
  await rest.channels.get('one').publish('n', 2);
  await shows('two messages', ({ heard }) => heard.length >= 2);
  assert.deepEqual((await room()).heard, [1, 2], 'each once');

  await opened.evaluate(() => window.show({ mood: 'better' }));
  await shows('other data', ({ names }) => names[0] === 'ann:better');
  await opened.evaluate(() => window.show({ room: 'two' }));
  await shows('the other channel', ({ channel, names }) => channel === 'two' && names[0] === 'ann:better');
  await until(() => opened.evaluate("fanfare.channels.get('one').state === 'detached'"), 'the first one to be left');
  await until(() => events.includes('leave one better'), 'the member to leave');
  assert.deepEqual(events, ['enter one well', 'update one better', 'enter two better', 'leave one better']);

  await watcher.channels.get('two').presence.enterClient('bob', { mood: 'calm' });
  await opened.evaluate(() => window.show({ room: undefined, watch: 'two' }));
  await until(async () => (await opened.textContent('#watch')) === '["bob"]', 'the members without this one');
  assert.equal(await opened.evaluate("fanfare.channels.get('two').state"), 'attached', 'another component still needs it');
  await opened.evaluate(() => window.show({ watch: undefined }));
  await until(() => opened.evaluate("fanfare.channels.get('two').state === 'detached'"), 'the last component to leave');
  assert.deepEqual(errors, []);
});

test('a component hears of a gap and of the state of the connection', async (context) => {
  if (!browser) return context.skip('there is no browser');
  const forgetful = await Node.start({ FANFARE_STORE: 'none' });
  context.after(() => forgetful.end());
  const opened = await browser.newPage();
  context.after(() => opened.close());
  await opened.goto(pages.url);
  await opened.addScriptTag({ url: '/app.js' });
  await opened.evaluate((url) => window.begin(url), forgetful.url);
  const state = () => opened.textContent('#state');
  await until(async () => (await state()) === 'connected', 'the connection');
  await until(async () => JSON.parse(await opened.textContent('#room')).state === 'attached', 'the channel');
  await forgetful.kill();
  await until(async () => (await state()) !== 'connected', 'the loss');
  await forgetful.restart();
  await until(async () => JSON.parse(await opened.textContent('#room')).discontinuities === 1, 'the gap');
});
