// The programs of the README do what they say.
import assert from 'node:assert/strict';
import { execFile } from 'node:child_process';
import { mkdtempSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { after, before, test } from 'node:test';
import { promisify } from 'node:util';

import { KEY, Node } from './support/node.js';

const ROOT = join(import.meta.dirname, '..');
const README = readFileSync(join(ROOT, 'README.md'), 'utf8');
const sections = README.split(/^## /m).map((section) => [section.slice(0, section.indexOf('\n')), /^```js\n(.*?)^```$/ms.exec(section)?.[1]]);
const programs = sections.filter(([, text]) => text !== undefined).map(([title, text]) => ({ title, text }));
const EXPECTED = {
  'Publish and subscribe': 'it works\n',
  'Sign tokens on a server': 'ann is in the lobby\n',
  Presence: 'ann: enter\nann is here\n',
  'History, and what was missed': 'before: 2\nbefore: 1\n',
  'Without a connection': 'true\ndrill\n',
};

let node;
before(async () => {
  node = await Node.start();
});
after(() => node?.end());

test('there are as many programs as are expected', () => {
  assert.deepEqual(programs.map(({ title }) => title), Object.keys(EXPECTED));
});

for (const { title, text } of programs) {
  test(`"${title}" runs`, async (context) => {
    // Within the package, so that its name leads to it.
    const folder = mkdtempSync(join(ROOT, 'dist-readme-'));
    context.after(() => rmSync(folder, { recursive: true }));
    const file = join(folder, 'program.mjs');
    writeFileSync(file, text);
    const environment = { ...process.env, FANFARE_URL: node.url, FANFARE_KEY: KEY };
    const { stdout } = await promisify(execFile)(process.execPath, [file], { env: environment, timeout: 30_000 });
    assert.equal(stdout, EXPECTED[title]);
  });
}
