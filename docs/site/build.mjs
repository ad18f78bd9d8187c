// The pages as a site, by mdBook: `node build.mjs MDBOOK PACKAGES OUT`. A warning of mdBook or a link that leads nowhere is an error.

import { execFileSync, spawnSync } from 'node:child_process';
import { cpSync, existsSync, mkdirSync, readFileSync, readdirSync, rmSync, statSync, writeFileSync } from 'node:fs';
import { dirname, join, relative, resolve } from 'node:path';
import { fileURLToPath } from 'node:url';

const here = dirname(fileURLToPath(import.meta.url));
const root = resolve(here, '../..');
const [mdbook, packages, out] = process.argv.slice(2).map((path) => resolve(path));

// The pages lie in the site as in the tree, so their links are the same.
const source = join(out, 'source');
rmSync(out, { recursive: true, force: true });
for (const path of tracked()) {
  mkdirSync(dirname(join(source, path)), { recursive: true });
  cpSync(join(root, path), join(source, path));
}
const contents = readFileSync(join(here, 'SUMMARY.md'), 'utf8').replaceAll('](../../', '](');
writeFileSync(join(source, 'SUMMARY.md'), contents);
cpSync(join(here, 'book.toml'), join(out, 'book.toml'));
cpSync(join(here, 'diagrams.js'), join(out, 'diagrams.js'));
cpSync(join(packages, 'node_modules/mermaid/dist/mermaid.min.js'), join(out, 'mermaid.min.js'));

const built = spawnSync(mdbook, ['build', out], { encoding: 'utf8' });
const mistakes = `${built.stdout}${built.stderr}`.split('\n').filter((line) => /\b(WARN|ERROR)\b/.test(line));
if (built.status !== 0) mistakes.push(`mdbook ended with ${built.status ?? built.error}: ${built.stderr}`);

const site = join(out, 'book');
const pages = built.status === 0 ? htmlPages(site) : [];
const anchors = new Map();
for (const page of pages) {
  // The README of a folder is its index in the site.
  writeFileSync(page, readFileSync(page, 'utf8').replaceAll(/(href="[^":]*)README\.html/g, '$1index.html'));
}
for (const page of pages) {
  for (const link of attributes(readFileSync(page, 'utf8'), 'href|src')) {
    const mistake = mistakeOf(page, link);
    if (mistake) mistakes.push(`${relative(site, page)}: ${link}: ${mistake}`);
  }
}

if (mistakes.length > 0) {
  console.error([...new Set(mistakes)].join('\n'));
  process.exit(1);
}
console.log(`${pages.length} pages without a warning: ${relative(process.cwd(), join(site, 'index.html'))}`);

// Files that a page can link to.
function tracked() {
  const listed = spawnSync('git', ['ls-files', '-z', '--cached', '--others', '--exclude-standard'], { cwd: root, encoding: 'utf8' });
  const paths = listed.status === 0 && listed.stdout
    ? listed.stdout.split('\0')
    : execFileSync('find', ['.', '-type', 'f', '-not', '-path', './target/*', '-not', '-path', '*/node_modules/*'], { cwd: root, encoding: 'utf8' })
      .split('\n').map((path) => path.replace(/^\.\//, ''));
  return paths.filter((path) => path && path !== 'docs/site/SUMMARY.md' && existsSync(join(root, path)) && statSync(join(root, path)).size < 1 << 20);
}

function htmlPages(folder) {
  return readdirSync(folder, { withFileTypes: true }).flatMap((entry) => {
    const path = join(folder, entry.name);
    if (entry.isDirectory()) return htmlPages(path);
    // The page for printing repeats the others, and that for missing pages has links for any place.
    return entry.name.endsWith('.html') && !['print.html', '404.html', 'toc.html'].includes(entry.name) ? [path] : [];
  });
}

function attributes(html, names) {
  return [...html.matchAll(new RegExp(`\\s(?:${names})="([^"]*)"`, 'g'))].map((match) => match[1]);
}

function mistakeOf(page, link) {
  if (/^[a-z]+:/.test(link) || link === '') return undefined;
  const [path, anchor] = decodeURI(link).split('#');
  let target = path === '' ? page : resolve(dirname(page), path);
  if (existsSync(target) && statSync(target).isDirectory()) target = join(target, 'index.html');
  if (!existsSync(target)) {
    // A folder of the tree that has no page, as for files of the code.
    return existsSync(resolve(root, relative(site, target))) ? undefined : 'there is no such file';
  }
  if (anchor === undefined || !target.endsWith('.html')) return undefined;
  if (!anchors.has(target)) anchors.set(target, new Set(attributes(readFileSync(target, 'utf8'), 'id')));
  return anchors.get(target).has(anchor) ? undefined : 'there is no such heading';
}
