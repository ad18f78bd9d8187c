import { join } from 'node:path';
import { build } from 'esbuild';

/** The exports of a source file, which the package itself does not export. */
export async function source(name) {
  const { outputFiles } = await build({
    entryPoints: [join(import.meta.dirname, '../../src', name)],
    bundle: true,
    write: false,
    format: 'esm',
    platform: 'node',
  });
  return import(`data:text/javascript;base64,${Buffer.from(outputFiles[0].contents).toString('base64')}`);
}
