// The guides: their programs run against a real node, and show the text of the files that they name.
import assert from 'node:assert/strict';
import { execFile, spawn, spawnSync } from 'node:child_process';
import { mkdirSync, mkdtempSync, readFileSync, rmSync, symlinkSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join, resolve } from 'node:path';
import { after, before, test } from 'node:test';
import { promisify } from 'node:util';

import { Realtime, Rest } from '@fanfare/client';
import { chromium } from 'playwright-core';

import { KEY, Node } from './support/node.js';
import { next, until } from './support/wait.js';

const ROOT = resolve(import.meta.dirname, '../../..');
const GUIDES = join(ROOT, 'docs/guides');
const PAGES = ['auth.md', 'first-app.md', 'presence.md', 'history-and-resume.md'];

/** A command for each signing program, and how to ask whether it is there. */
const SIGNERS = [
  { file: 'token_request.mjs', command: ['node'], probe: '--version', isNeeded: true },
  { file: 'token_request.py', command: ['python3'], probe: '--version', isNeeded: true },
  { file: 'token_request.rb', command: ['ruby'], probe: '--version', isNeeded: false },
  { file: 'token_request.go', command: ['go', 'run'], probe: 'version', isNeeded: true },
  { file: 'token_request.php', command: ['php'], probe: '--version', isNeeded: false },
];

/** The blocks of a page that stand below `<!-- program: NAME -->` or `<!-- prints: NAME -->`. */
function blocks(page, mark) {
  const text = readFileSync(join(GUIDES, page), 'utf8');
  const found = text.matchAll(new RegExp(`<!-- ${mark}: (\\S+) -->\\n\`\`\`\\w+\\n(.*?)\`\`\`\\n`, 'gs'));
  return [...found].map(([, name, block]) => [name, block]);
}

const programs = new Map(PAGES.flatMap((page) => blocks(page, 'program')));
const prints = new Map(PAGES.flatMap((page) => blocks(page, 'prints')));

// A folder as a reader of the guides has it.
const folder = mkdtempSync(join(tmpdir(), 'fanfare-guides-'));
mkdirSync(join(folder, 'node_modules/@fanfare'), { recursive: true });
symlinkSync(join(ROOT, 'clients/js'), join(folder, 'node_modules/@fanfare/client'));

let node;
before(async () => {
  node = await Node.start();
  for (const [name, block] of programs) writeFileSync(join(folder, name), block.replace('http://127.0.0.1:8080', node.url));
});
after(async () => {
  await node?.end();
  rmSync(folder, { recursive: true, force: true });
});

const environment = () => ({ ...process.env, FANFARE_URL: node.url, FANFARE_KEY: KEY, PORT: '0' });

/** Runs a program to its end. */
async function run(name) {
  const { stdout } = await promisify(execFile)('node', [name], { cwd: folder, env: environment(), timeout: 60_000 });
  return stdout;
}

/** Starts a program that goes on until its test ends. */
function start(context, name, further = {}) {
  const child = spawn('node', [name], { cwd: folder, env: { ...environment(), ...further } });
  const started = { output: '' };
  for (const stream of [child.stdout, child.stderr]) stream.on('data', (data) => (started.output += data));
  started.says = (pattern) => until(() => pattern.exec(started.output), `${name} to say ${pattern}`, () => started.output);
  context.after(() => child.kill('SIGKILL'));
  return started;
}

function isThere(command, probe) {
  return spawnSync(command, [probe], { stdio: 'ignore' }).status === 0;
}

for (const { file, command, probe, isNeeded } of SIGNERS) {
  test(`${file} is the text that the page shows`, () => {
    const page = readFileSync(join(GUIDES, 'auth.md'), 'utf8');
    const [, shown] = new RegExp(`\\[${file}\\]\\(sign/${file}\\)\\n\\n\`\`\`\\w+\\n(.*?)\`\`\`\\n`, 's').exec(page) ?? [];
    assert.equal(shown, readFileSync(join(GUIDES, 'sign', file), 'utf8'));
  });

  test(`${file} signs a request that a node exchanges`, async (context) => {
    if (!isThere(command[0], probe)) {
      assert.ok(!isNeeded || process.env.CI !== 'true', `${command[0]} is missing`);
      return context.skip(`${command[0]} is missing`);
    }
    const signWith = async (key, ...given) => {
      const [program, ...before] = command;
      const env = { ...environment(), FANFARE_KEY: key, GO111MODULE: 'off' };
      const { stdout } = await promisify(execFile)(program, [...before, join(GUIDES, 'sign', file), ...given], { env, timeout: 120_000 });
      return JSON.parse(stdout);
    };
    const exchange = async (request) => {
      const body = JSON.stringify(request);
      const response = await fetch(`${node.url}/keys/${request.keyName}/requestToken`, { method: 'POST', body });
      const told = await response.text();
      assert.equal(response.status, 200, told);
      return JSON.parse(told);
    };

    const capability = '{"chat:ü/*":["subscribe","publish"]}';
    const details = await exchange(await signWith(KEY, 'ann ü', capability));
    assert.equal(details.clientId, 'ann ü');
    assert.deepEqual(JSON.parse(details.capability), { 'chat:ü/*': ['publish', 'subscribe'] });
    assert.equal(details.expires - details.issued, 3_600_000);
    const client = new Realtime({ url: node.url, token: details.token });
    context.after(() => client.close());
    const channel = client.channels.get(`chat:ü/${file}`);
    const heard = new Promise((done) => channel.subscribe(done));
    await channel.publish('x', 1);
    assert.equal((await heard).clientId, 'ann ü');

    const whole = await exchange(await signWith(KEY));
    assert.equal(whole.clientId, undefined);
    assert.deepEqual(Object.keys(JSON.parse(whole.capability)), ['*']);
    await assert.rejects(signWith('nodot'), ({ stdout, stderr }) => {
      return /FANFARE_KEY must be <secret>\.<keyName>/.test(stdout + stderr);
    });
  });
}

/** Programs with a test of their own. */
const DRIVEN = ['token-server.mjs', 'client.mjs', 'revoke.mjs', 'server.mjs', 'index.html', 'keep-up.mjs', 'members.mjs', 'presence.mjs'];

test('every program of the guides is run here', () => {
  assert.deepEqual([...programs.keys()].filter((name) => !DRIVEN.includes(name) && !prints.has(name)), []);
  assert.deepEqual([...prints.keys()].filter((name) => !programs.has(name)), []);
  for (const name of DRIVEN) assert.ok(programs.has(name), name);
});

for (const page of PAGES) {
  test(`every JavaScript block of ${page} can be parsed`, () => {
    const text = readFileSync(join(GUIDES, page), 'utf8');
    for (const [, block] of text.matchAll(/```js\n(.*?)```/gs)) {
      const { status, stderr } = spawnSync('node', ['--input-type=module', '--check'], { input: block });
      assert.equal(status, 0, `${stderr}\n${block}`);
    }
  });

  test(`links of ${page} lead to files and headings`, () => {
    const text = readFileSync(join(GUIDES, page), 'utf8').replace(/```.*?```/gs, '');
    for (const [, link] of text.matchAll(/\]\(([^)]+)\)/g)) {
      const [path, heading] = link.split('#');
      const target = readFileSync(path ? join(GUIDES, path) : join(GUIDES, page), 'utf8');
      const headings = [...target.matchAll(/^#+ (.*)$/gm)].map(([, title]) => title.toLowerCase().replace(/[^\p{L}\p{N} -]/gu, '').replace(/ /g, '-'));
      assert.ok(heading === undefined || headings.includes(heading), link);
    }
  });
}

for (const name of [...prints.keys()].filter((name) => !DRIVEN.includes(name))) {
  test(`${name} prints what the guide says`, async () => {
    assert.equal(await run(name), prints.get(name));
  });
}

test('presence.mjs and members.mjs print what the guide says', async () => {
  assert.equal(await run('presence.mjs'), prints.get('presence.mjs'));
  const { presence } = new Rest({ url: node.url, key: KEY }).channels.get('room');
  await until(async () => (await presence.history()).items.length === 5, 'the last leave');
  assert.equal(await run('members.mjs'), prints.get('members.mjs'));
});

test('a client gets its token from the token server', async (context) => {
  const server = start(context, 'token-server.mjs');
  const [, authUrl] = await server.says(/token server: (\S+)/);
  assert.equal((await fetch(authUrl)).status, 403);
  const client = start(context, 'client.mjs', { AUTH_URL: authUrl, FANFARE_KEY: '' });
  await client.says(/^ann: hello$/m);

  const watched = new Realtime({ url: node.url, authUrl, authHeaders: { authorization: 'Bearer session-of-ann' } });
  context.after(() => watched.close());
  await next(watched.connection, 'connected');
  const changes = [];
  watched.connection.on('change', ({ current, reason }) => changes.push([current, reason?.code]));
  await run('revoke.mjs');
  await until(() => changes.length === 3, 'another token');
  assert.deepEqual(changes, [['disconnected', 40100], ['connecting', undefined], ['connected', undefined]]);

  const stranger = new Realtime({ url: node.url, authUrl });
  const { reason } = await next(stranger.connection, 'failed');
  assert.deepEqual([reason.code, reason.statusCode], [80019, 403]);
});

test('codes of the table of errors are those of the client', async (context) => {
  const rest = new Rest({ url: node.url, key: KEY });
  const failure = async (authCallback, options = {}) => {
    const client = new Realtime({ url: node.url, authCallback, ...options });
    context.after(() => client.close());
    return new Promise((done) => client.connection.on('change', ({ reason }) => reason && done(reason)));
  };
  const used = await rest.auth.createTokenRequest();
  await failure(() => ({ ...used, mac: 'x' })).then(({ code, message, cause }) => {
    assert.deepEqual([code, message, cause], [40100, 'invalid token request mac', undefined]);
  });
  const late = await failure(() => rest.auth.createTokenRequest({ timestamp: Date.now() - 300_000 }));
  assert.deepEqual([late.code, late.message], [40100, "token request timestamp is not within 2 minutes of the server's clock"]);
  const first = new Realtime({ url: node.url, authCallback: () => used });
  context.after(() => first.close());
  await next(first.connection, 'connected');
  const twice = await failure(() => used);
  assert.deepEqual([twice.code, twice.message], [40100, 'token request nonce has been used']);
  const other = await failure(() => rest.auth.requestToken({ clientId: 'ann' }), { clientId: 'bob' });
  assert.deepEqual([other.code, other.message], [40100, 'unauthorized']);
  const narrow = new Rest({ url: node.url, key: 'shush.k2' });
  assert.equal((await failure(() => narrow.auth.createTokenRequest({ capability: { '*': ['publish'] } }))).code, 40160);
  const none = await failure(() => Promise.reject(new Error('no session')));
  assert.deepEqual([none.code, none.cause.message], [80019, 'no session']);
});

test('two tabs chat', async (context) => {
  const names = ['chromium', 'chromium-browser', 'google-chrome'];
  const [executablePath] = names.map((name) => spawnSync('which', [name], { encoding: 'utf8' }).stdout.trim()).filter(Boolean);
  if (!executablePath) {
    assert.notEqual(process.env.CI, 'true', 'Chromium is missing');
    return context.skip('Chromium is missing');
  }
  const server = start(context, 'server.mjs');
  const [, address] = await server.says(/chat: (\S+)\?name=ann/);
  const browser = await chromium.launch({ executablePath, args: ['--no-sandbox'] });
  context.after(() => browser.close());
  const open = async (name) => {
    const tab = await browser.newPage();
    tab.setDefaultTimeout(30_000);
    await tab.goto(`${address}?name=${name}`);
    await tab.getByText(`connected as ${name}`).waitFor();
    return tab;
  };
  const [ann, bob] = [await open('ann'), await open('bob')];
  for (const [tab, said] of [[ann, 'hello'], [bob, 'hi <b>ann</b>']]) {
    await tab.fill('#text', said);
    await tab.click('button');
    const line = `${tab === ann ? 'ann' : 'bob'}: ${said}`;
    for (const each of [ann, bob]) await each.locator('li', { hasText: line }).waitFor();
  }
  await bob.reload();
  await bob.locator('li', { hasText: 'ann: hello' }).waitFor();
  assert.equal(await bob.locator('li').count(), 2);

  await node.kill();
  await ann.getByText('disconnected').waitFor();
  await ann.fill('#text', 'are you there?');
  await ann.click('button');
  await node.restart();
  await bob.locator('li', { hasText: 'ann: are you there?' }).waitFor();
});

test('keep-up.mjs goes on after a restart and reloads after a discontinuity', async (context) => {
  const rest = () => new Rest({ url: node.url, key: KEY }).channels.get('orders');
  for (const number of [1, 2]) await rest().publish('order', number);
  const program = start(context, 'keep-up.mjs');
  await program.says(/^orders: 1 2$/m);
  await rest().publish('order', 3);
  await program.says(/^orders: 1 2 3$/m);
  await node.kill();
  await node.restart();
  await rest().publish('order', 4);
  await program.says(/^orders: 1 2 3 4\n$/m);
  assert.equal(program.output, 'orders: 1 2\norders: 1 2 3\norders: 1 2 3 4\n');

  // Another node at this address, which knows nothing of the channel.
  const { listen } = node;
  await node.end();
  node = await Node.start({ FANFARE_LISTEN: listen });
  await rest().publish('order', 5);
  await program.says(/^orders: 5\n$/m);
});
