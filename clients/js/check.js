// Checks the package as it would be published: its form, its types, its files, its size, and its documentation.
import { execFileSync } from 'node:child_process';
import { mkdtempSync, readFileSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { dirname, join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { gzipSync } from 'node:zlib';
import { build } from 'esbuild';

const root = dirname(fileURLToPath(import.meta.url));
const failures = [];

function run(name, ...args) {
  try {
    execFileSync(process.execPath, [join(root, 'node_modules', name), ...args], { cwd: root, stdio: 'pipe' });
    console.log(`ok      ${name.split('/').at(-1)}`);
  } catch (error) {
    failures.push(`${name} ${args.join(' ')}\n${error.stdout}${error.stderr}`);
  }
}

/** Bytes of what a page loads for these imports, as bundlers make it. */
async function size(text) {
  const { outputFiles } = await build({
    stdin: { contents: text, resolveDir: root },
    bundle: true,
    minify: true,
    format: 'esm',
    platform: 'browser',
    external: ['react'],
    write: false,
  });
  return gzipSync(outputFiles[0].contents, { level: 9 }).length;
}

run('publint/src/cli.js', '--strict');
run('@arethetypeswrong/cli/dist/index.js', '--pack', '.', '--profile', 'node16', '--quiet');
run('typescript/bin/tsc', '--noEmit', '-p', 'test/types');
const pages = mkdtempSync(join(tmpdir(), 'fanfare-typedoc-'));
run('typedoc/bin/typedoc', '--treatWarningsAsErrors', '--treatValidationWarningsAsErrors', '--out', pages);
rmSync(pages, { recursive: true });

for (const [what, text, max] of [
  ['all of it', "export * from '@fanfare/client'", 15_000],
  ['Rest alone', "export { Rest } from '@fanfare/client'", 5_000],
  ['React hooks', "export * from '@fanfare/client/react'", 2_000],
  ['MessagePack', "export * from '@fanfare/client/msgpack'", 7_000],
]) {
  const bytes = await size(text);
  console.log(`${String(bytes).padStart(6)}  bytes gzipped: ${what}, at most ${max}`);
  if (bytes > max) failures.push(`${what}: ${bytes} bytes gzipped, at most ${max}`);
}

const EXPECTED = [
  ...['LICENSE', 'NOTICES', 'README.md', 'package.json'],
  ...['index', 'msgpack', 'react'].flatMap((name) => ['cjs', 'd.cts', 'd.ts', 'js'].map((ending) => `dist/${name}.${ending}`)),
  ...['dist/node.cjs', 'dist/node.js', 'dist/ws.cjs'],
].sort();
const [{ files }] = JSON.parse(execFileSync('npm', ['pack', '--dry-run', '--json', '--ignore-scripts'], { cwd: root }));
const packed = files.map(({ path }) => path).sort();
if (packed.join() !== EXPECTED.join()) failures.push(`the package has\n  ${packed.join('\n  ')}\nand not\n  ${EXPECTED.join('\n  ')}`);
const { dependencies = {} } = JSON.parse(readFileSync(join(root, 'package.json'), 'utf8'));
if (Object.keys(dependencies).length > 0) failures.push(`there are dependencies: ${Object.keys(dependencies)}`);

for (const failure of failures) console.error(failure);
process.exit(failures.length > 0 ? 1 : 0);
