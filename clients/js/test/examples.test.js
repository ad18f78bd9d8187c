// The examples, served as `npm start` does, in a real browser.
import assert from 'node:assert/strict';
import { spawn } from 'node:child_process';
import { join } from 'node:path';
import { after, before, test } from 'node:test';

import { openBrowser } from './support/browser.js';
import { KEY, Node } from './support/node.js';
import { until } from './support/wait.js';

const SERVER = join(import.meta.dirname, '../examples/server.js');

let node;
let browser;
before(async () => {
  node = await Node.start();
  browser = await openBrowser();
});
after(async () => {
  await browser?.close();
  await node?.end();
});

/** Two pages of an example, of ann and bob. */
async function pages(context, example) {
  const environment = { ...process.env, FANFARE_URL: node.url, FANFARE_KEY: KEY, PORT: '0' };
  const server = spawn(process.execPath, [SERVER, example], { env: environment });
  context.after(() => server.kill());
  const url = await new Promise((told) => server.stdout.once('data', (line) => told(String(line).trim())));
  const opened = [];
  for (const name of ['ann', 'bob']) {
    const page = await browser.newPage();
    context.after(() => page.close());
    page.on('pageerror', (error) => opened.errors.push(String(error)));
    await page.goto(`${url}/?name=${name}`);
    opened.push(page);
  }
  opened.errors = [];
  return opened;
}

test('two people chat, see who is there and who types', async (context) => {
  if (!browser) return context.skip('there is no browser');
  const [ann, bob] = await pages(context, 'chat');
  for (const page of [ann, bob]) {
    await until(async () => (await page.textContent('#members')) === 'Here: ann, bob', 'both to be there');
  }
  await ann.fill('#text', 'hello');
  await until(async () => (await bob.textContent('#typing')).startsWith('ann'), 'ann to type');
  await ann.press('#text', 'Enter');
  await until(async () => (await bob.textContent('#messages')) === 'ann: hello', 'the message');
  assert.equal(await bob.textContent('#typing'), '');
  await bob.reload();
  await until(async () => (await bob.textContent('#messages')) === 'ann: hello', 'what was said before');
});

test('a cursor moves on the page of another', async (context) => {
  if (!browser) return context.skip('there is no browser');
  const [ann, bob] = await pages(context, 'cursors');
  const seen = async () => bob.evaluate(() => document.querySelector('.cursor')?.textContent);
  await until(async () => {
    await ann.mouse.move(100 + Math.random() * 100, 200);
    return (await seen()) === 'ann';
  }, 'the cursor');
  await ann.close();
  await until(async () => (await seen()) === undefined, 'the cursor to go', () => '', 60_000);
});
