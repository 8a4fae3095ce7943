/**
 * The API described by its own rules: every route, and for each body the schema that also checks it. The document of
 * GET /openapi.json and the page of GET /docs. Pure.
 */
import type { Access } from './access.ts';
import type { Field, JsonSchema } from './fields.ts';

/** One route, as it is registered and as it is described. */
export interface Endpoint {
  readonly method: 'GET' | 'POST';
  /** As fastify has it. */
  readonly path: string;
  readonly summary: string;
  readonly access: Access;
  /** The rule of its body; none for routes without one. */
  readonly body?: Field<unknown>;
  /** Answers as an event stream where `stream` is true. */
  readonly streams?: boolean;
  /** Errors are worded as Anthropic does. */
  readonly shape?: 'anthropic';
}

const errorSchema: JsonSchema = {
  type: 'object',
  required: ['error'],
  properties: {
    error: {
      type: 'object',
      required: ['message', 'type', 'param', 'code'],
      properties: {
        message: { type: 'string' },
        type: { type: 'string' },
        param: { type: ['string', 'null'] },
        code: { type: 'string' },
      },
    },
  },
};

/** The OpenAPI 3.1 document of these routes. */
export function openapiDocument(endpoints: readonly Endpoint[], version: string): object {
  const paths: Record<string, Record<string, object>> = {};
  for (const endpoint of endpoints) {
    const { method, summary, access, body, streams } = endpoint;
    const path = endpoint.path.replace(/\*$/, '{id}');
    const parameters = path.endsWith('{id}')
      ? { parameters: [{ name: 'id', in: 'path', required: true, schema: { type: 'string' } }] }
      : {};
    const answer = {
      ...(streams === true ? { 'text/event-stream': { schema: { type: 'string' } } } : {}),
      'application/json': { schema: {} },
    };
    (paths[path] ??= {})[method.toLowerCase()] = {
      summary,
      ...parameters,
      ...(body === undefined
        ? {}
        : { requestBody: { required: true, content: { 'application/json': { schema: body.schema } } } }),
      responses: {
        '200': { description: 'The answer.', content: answer },
        default: { description: 'An error.', content: { 'application/json': { schema: errorSchema } } },
      },
      ...(access === 'open' ? {} : { security: [{ [access === 'admin' ? 'adminKey' : 'apiKey']: [] }] }),
    };
  }
  return {
    openapi: '3.1.0',
    info: { title: 'Handoff', version, description: 'Fields that are not described are ignored; null means absent.' },
    paths,
    components: {
      securitySchemes: {
        apiKey: { type: 'http', scheme: 'bearer', description: 'A key of --api-key, where any is configured.' },
        adminKey: { type: 'http', scheme: 'bearer', description: 'The key of --admin-key.' },
      },
    },
  };
}

/** The same as a page that loads nothing from anywhere. */
export function docsPage(endpoints: readonly Endpoint[], version: string): string {
  const sections = endpoints.map((endpoint) => {
    const { method, path, summary, access, body } = endpoint;
    const needs = { open: '', key: ' · API key', admin: ' · admin key' }[access];
    return `<section><h2><code>${method} ${escapeHtml(path)}</code></h2><p>${escapeHtml(summary)}${needs}</p>${
      body === undefined ? '' : fieldTable(body.schema)
    }</section>`;
  });
  return `<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Handoff ${escapeHtml(version)}</title><style>
body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222}
code{font-size:14px}table{border-collapse:collapse;width:100%}td{border-top:1px solid #ddd;padding:.2rem .6rem .2rem 0;vertical-align:top}
h2{margin:2rem 0 0}p{margin:.2rem 0 .6rem}</style></head><body><h1>Handoff ${escapeHtml(version)}</h1>
<p>The same for machines: <a href="/openapi.json">/openapi.json</a>. Null means absent; unknown fields are ignored.</p>
${sections.join('\n')}</body></html>`;
}

function fieldTable(schema: JsonSchema): string {
  const properties = (schema['properties'] ?? {}) as Record<string, JsonSchema>;
  const required = (schema['required'] ?? []) as string[];
  const rows = Object.entries(properties).map(([name, property]) => {
    const notes = [
      required.includes(name) ? 'required' : '',
      typeof property['description'] === 'string' ? property['description'] : '',
    ];
    const cells = [
      `<code>${escapeHtml(name)}</code>`,
      escapeHtml(typeOf(property)),
      escapeHtml(notes.join(' ').trim()),
    ];
    return `<tr>${cells.map((cell) => `<td>${cell}</td>`).join('')}</tr>`;
  });
  return `<table>${rows.join('')}</table>`;
}

/** A schema in a few words; null is left out, as every optional field takes it. */
function typeOf(schema: JsonSchema): string {
  const options = schema['anyOf'] as JsonSchema[] | undefined;
  if (options !== undefined) {
    return options
      .filter((option) => option['type'] !== 'null')
      .map(typeOf)
      .join(' or ');
  }
  const values = schema['enum'] as unknown[] | undefined;
  if (values !== undefined) return values.map((value) => JSON.stringify(value)).join(', ');
  const type = typeof schema['type'] === 'string' ? schema['type'] : 'anything';
  if (type === 'array') return `array of ${typeOf((schema['items'] ?? {}) as JsonSchema)}`;
  const least = schema['minimum'] ?? schema['exclusiveMinimum'];
  const most = schema['maximum'] ?? schema['exclusiveMaximum'];
  if (typeof least !== 'number') return type;
  return typeof most === 'number' ? `${type} ${least} to ${most}` : `${type}, at least ${least}`;
}

function escapeHtml(text: string): string {
  return text.replaceAll('&', '&amp;').replaceAll('<', '&lt;').replaceAll('>', '&gt;').replaceAll('"', '&quot;');
}
