// Builds dist/: three entries, each as ES module and CommonJS, with types; and api/, the report of the public surface.
import { Extractor, ExtractorConfig } from '@microsoft/api-extractor';
import { execFileSync } from 'node:child_process';
import { copyFileSync, mkdirSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { dirname, join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { build } from 'esbuild';

const root = dirname(fileURLToPath(import.meta.url));
const at = (...parts) => join(root, ...parts);
/** With `--update` a changed public surface is written down; otherwise it is an error. */
const isUpdate = process.argv.includes('--update');

rmSync(at('dist'), { recursive: true, force: true });
rmSync(at('types'), { recursive: true, force: true });

// What a browser loads, and what a server does. `ws` stands in for the WebSocket that Node has from version 22 on.
const common = { bundle: true, target: 'es2022', external: ['react', './ws.cjs', '@fanfare/client'], logLevel: 'warning' };
const browser = { ...common, platform: 'browser', entryPoints: ['index', 'msgpack', 'react'].map((name) => at('src', `${name}.ts`)) };
const ws = { name: 'ws', setup: ({ onResolve }) => onResolve({ filter: /^ws$/ }, () => ({ path: './ws.cjs', external: true })) };
const node = { ...common, platform: 'node', target: 'node20', entryPoints: [at('src/node.ts')], plugins: [ws] };
const formats = [
  { format: 'esm', outdir: at('dist') },
  { format: 'cjs', outdir: at('dist'), outExtension: { '.js': '.cjs' } },
];
for (const format of formats) {
  await build({ ...browser, ...format });
  await build({ ...node, ...format });
}
await build({ ...common, platform: 'node', target: 'node20', format: 'cjs', entryPoints: [at('src/ws.ts')], outfile: at('dist/ws.cjs') });

execFileSync(process.execPath, [at('node_modules/typescript/bin/tsc')], { cwd: root, stdio: 'inherit' });
mkdirSync(at('api'), { recursive: true });
const config = ExtractorConfig.prepare({
  configObjectFullPath: undefined,
  packageJsonFullPath: at('package.json'),
  configObject: {
    projectFolder: root,
    mainEntryPointFilePath: at('types/index.d.ts'),
    compiler: { tsconfigFilePath: at('tsconfig.json') },
    apiReport: { enabled: true, reportFolder: at('api'), reportTempFolder: at('types/api'), reportFileName: 'index.api.md' },
    docModel: { enabled: false },
    dtsRollup: { enabled: true, publicTrimmedFilePath: at('dist/index.d.ts') },
    tsdocMetadata: { enabled: false },
    messages: {
      compilerMessageReporting: { default: { logLevel: 'warning' } },
      extractorMessageReporting: {
        default: { logLevel: 'warning' },
        'ae-missing-release-tag': { logLevel: 'none' },
        'ae-undocumented': { logLevel: 'none' },
        // Of members that are internal, and not in the types that are shipped.
        'ae-forgotten-export': { logLevel: 'none' },
      },
      tsdocMessageReporting: { default: { logLevel: 'warning' } },
    },
  },
});
const { succeeded } = Extractor.invoke(config, { localBuild: isUpdate, showVerboseMessages: false });
if (!succeeded) changed('index.api.md');
// Of one file each; they name the types of the first one by its package.
for (const name of ['msgpack', 'react']) {
  const types = readFileSync(at('types', `${name}.d.ts`), 'utf8');
  const report = at('api', `${name}.d.ts`);
  if (isUpdate) writeFileSync(report, types);
  else if (readFileSync(report, 'utf8') !== types) changed(`${name}.d.ts`);
  writeFileSync(at('dist', `${name}.d.ts`), types);
}
for (const name of ['index', 'msgpack', 'react']) copyFileSync(at('dist', `${name}.d.ts`), at('dist', `${name}.d.cts`));
rmSync(at('types'), { recursive: true });

function changed(report) {
  console.error(`api/${report} is not what the sources say, or there are warnings: node build.js --update`);
  process.exit(1);
}
