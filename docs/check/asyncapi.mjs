// docs/asyncapi.yaml against the schema of AsyncAPI 3.0, and each of its examples against the schema of its message.

import { readFileSync } from 'node:fs';
import { createRequire } from 'node:module';

// The packages lie in the folder where `make` has installed them, outside the sources.
const [page, installed] = process.argv.slice(2);
const require = createRequire(`${installed}/`);
const Ajv = require('ajv');
const addFormats = require('ajv-formats');
const yaml = require('js-yaml');

const document = yaml.load(readFileSync(page, 'utf8'));
const mistakes = [];

function check(what, schema, value) {
  const ajv = new Ajv({ strict: false, allErrors: true });
  addFormats(ajv);
  // The examples reach the schemas that they share through the document.
  ajv.addSchema({ $id: 'document', ...document });
  const validate = ajv.compile(schema);
  if (!validate(value)) {
    mistakes.push(...validate.errors.map((error) => `${what}${error.instancePath}: ${error.message}`));
  }
}

check('document', require('@asyncapi/specs/schemas/3.0.0-without-$id.json'), document);

function absolute(schema) {
  if (Array.isArray(schema)) return schema.map(absolute);
  if (schema === null || typeof schema !== 'object') return schema;
  const entries = Object.entries(schema).map(([key, value]) => {
    return [key, key === '$ref' ? value.replace('#/', 'document#/') : absolute(value)];
  });
  return Object.fromEntries(entries);
}

let examples = 0;
for (const [name, message] of Object.entries(document.components.messages)) {
  for (const example of message.examples ?? []) {
    check(`${name}, example ${example.name}`, absolute(message.payload), example.payload);
    examples += 1;
  }
}

for (const operation of Object.values(document.operations)) {
  for (const { $ref } of operation.messages) {
    const target = $ref.slice(2).split('/').reduce((node, part) => node?.[part], document);
    if (target === undefined) mistakes.push(`${$ref} names nothing`);
  }
}

if (examples === 0) mistakes.push('there are no examples');
if (mistakes.length > 0) {
  console.error(mistakes.map((mistake) => `${page}: ${mistake}`).join('\n'));
  process.exit(1);
}
console.log(`${page}: valid AsyncAPI 3.0, and so are its ${examples} examples`);
