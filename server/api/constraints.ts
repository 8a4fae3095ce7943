/**
 * What a request wants its answer held to, whichever API it speaks: a format of the text, a tool that must be called, or
 * both. Becomes the constraint that server/grammar/ follows. Pure.
 */
import { ApiError } from '../errors.ts';
import { packConstraint, type Constraint, type ConstrainedTool, type ReadConstraint } from '../grammar/constraint.ts';
import { anyObject, boolean, choice, isObject, missing, object, optional, pathOf, text, wrong } from './fields.ts';
import type { Field, JsonSchema } from './fields.ts';
import type { GenerationCall } from './sampling.ts';

/** Which tools the model may or must call; `name`: this one, once. */
export type ToolChoice = 'auto' | 'none' | 'required' | { readonly name: string };

/** Calls of one answer that must call tools, at most. */
const maxForcedCalls = 128;

/** The format of an answer's text. */
export interface AnswerFormat {
  /** A JSON schema, and where it stands in the request. */
  readonly schema: object;
  readonly path: string;
  /** Whether the schema is the client's own, which the model is shown if its checkpoint has words for that. */
  readonly isShown: boolean;
}

const namePattern = /^[A-Za-z0-9_-]{1,64}$/;
const schemaName: Field<string> = {
  expected: 'a name of 1 to 64 letters, digits or _ -',
  schema: { type: 'string', pattern: namePattern.source },
  read(value, path) {
    if (typeof value !== 'string') throw wrong('invalid_type', path, this.expected, value);
    if (!namePattern.test(value)) throw wrong('invalid_value', path, this.expected, value);
    return value;
  },
};

const schemaFields = object({
  name: schemaName,
  description: optional(text()),
  schema: anyObject(),
  strict: optional(boolean()),
});
const kindFields = object({ type: choice(['text', 'json_object', 'json_schema', 'structural_tag']) });

/** A format, as OpenAI's older APIs nest it (in `json_schema`), its newer one does not, and Anthropic names none. */
function formatField(kind: 'nested' | 'flat' | 'nameless'): Field<AnswerFormat | undefined> {
  const parts: JsonSchema = kind === 'nameless' ? { schema: { type: 'object' } } : schemaProperties();
  return {
    expected: 'an object with a type',
    schema: {
      anyOf: [
        {
          type: 'object',
          properties: {
            type: { enum: kind === 'nameless' ? ['json_schema'] : ['text', 'json_object', 'json_schema'] },
            ...(kind === 'nested' ? { json_schema: schemaFields.schema } : parts),
          },
          required: ['type'],
        },
        { type: 'null' },
      ],
    },
    isOptional: true,
    read(value, path) {
      if (value === undefined || value === null) return undefined;
      const { type } = kindFields.read(value, path);
      if (!isObject(value) || type === 'text') return undefined;
      if (type === 'structural_tag') {
        throw new ApiError('unsupported_value', `${path}.type must be "text", "json_object" or "json_schema".`, {
          param: `${path}.type`,
        });
      }
      if (type === 'json_object') return { schema: { type: 'object' }, path, isShown: false };
      const inner = kind === 'nested' ? pathOf(path, 'json_schema') : path;
      const described = kind === 'nested' ? (value['json_schema'] ?? undefined) : value;
      if (described === undefined) throw missing(inner, 'an object with a name and a schema');
      const fields =
        kind === 'nameless'
          ? object({ schema: anyObject() }).read(described, inner)
          : schemaFields.read(described, inner);
      return { schema: fields.schema, path: pathOf(inner, 'schema'), isShown: true };
    },
  };
}

function schemaProperties(): JsonSchema {
  return schemaFields.schema['properties'] as JsonSchema;
}

/** `response_format` of chat and completion requests. */
export const responseFormatField = formatField('nested');
/** `text.format` of /v1/responses. */
export const textFormatField = formatField('flat');
/** `output_config.format` of /v1/messages. */
export const outputFormatField = formatField('nameless');

/** What a plan says of an answer that is held to something. */
export interface PackedConstraint {
  /** As it goes to the workers. */
  readonly text: string;
  readonly check: ReadConstraint['check'];
  /** Whether the answer can be nothing but tool calls. */
  readonly onlyCalls: boolean;
}

/** What of a request decides what its answer is held to. */
export interface Wishes {
  readonly format: AnswerFormat | undefined;
  readonly choice: ToolChoice;
  readonly tools: readonly { readonly tool: ConstrainedTool; readonly path: string }[];
  readonly oneCall: boolean;
  readonly thinking: boolean;
  /** Whether the answer goes on with a message of the request. */
  readonly continues: boolean;
  readonly call: Pick<GenerationCall, 'ignoreEos' | 'sampling'>;
}

/**
 * The constraint of a request; undefined if its answer is free.
 *
 * @throws ApiError for schemas that cannot be followed, and for fields that do not go with a constraint.
 */
export function constrain(wishes: Wishes): PackedConstraint | undefined {
  const { format, choice: chosen, tools, oneCall, thinking } = wishes;
  const isForced = chosen === 'required' || typeof chosen === 'object';
  if (format === undefined && !isForced) return undefined;
  const field = isForced ? 'tool_choice' : (format?.path.split('.')[0] ?? '');
  if (wishes.call.ignoreEos) throw doesNotGo('ignore_eos', field);
  if ((wishes.call.sampling.rules?.minTokens ?? 0) > 0) throw doesNotGo('min_tokens', field);
  if (wishes.continues) throw doesNotGo('continue_final_message', field);
  const offered =
    typeof chosen === 'object' ? tools.filter(({ tool }) => tool.name === chosen.name) : chosen === 'none' ? [] : tools;
  const constraint: Constraint = {
    thinking,
    // A tool that must be called leaves no text that could have a format.
    schema: isForced || format === undefined ? null : { value: format.schema, path: format.path },
    tools: offered.map(({ tool: { name, parameters, strict }, path }) => ({
      tool: { name, parameters, strict },
      path,
    })),
    maxCalls: oneCall || typeof chosen === 'object' ? 1 : maxForcedCalls,
  };
  const { text: packed, read } = packConstraint(constraint);
  return { text: packed, check: (answer) => read.check(answer), onlyCalls: isForced };
}

function doesNotGo(param: string, field: string): ApiError {
  return new ApiError('unsupported_value', `${param} does not go together with ${field}: leave one of them out.`, {
    param,
  });
}
