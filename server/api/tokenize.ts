/** POST /tokenize and /detokenize: the fields of their requests. Pure. */
import type { Conversation } from '../../model/chat.ts';
import { ApiError } from '../errors.ts';
import { conversationOf, messagesField, thinkingFields, toolsField } from './conversation.ts';
import { boolean, list, missing, object, optional, text, wellFormed, wrong } from './fields.ts';
import type { Field, JsonObject } from './fields.ts';
import { readTokenIds, servedModelName } from './sampling.ts';
import type { ServedModel } from './sampling.ts';

const maxTextCount = 256;
const maxSequenceCount = 256;

/** A checked request to /tokenize: texts, or a conversation to be rendered as chat would. */
export type TokenizeCall = (
  | { kind: 'texts'; texts: string[]; nested: boolean }
  | { kind: 'chat'; conversation: Conversation }
) & { returnTokenStrings: boolean };

const texts = list(text(), { minItems: 1, maxItems: maxTextCount });

const prompt: Field<string | string[]> = {
  expected: 'a string, an array of strings, or messages in its place',
  schema: { anyOf: [{ type: 'string' }, texts.schema] },
  read(value, path) {
    if (typeof value === 'string') return wellFormed(value);
    if (Array.isArray(value)) return texts.read(value, path);
    throw wrong('invalid_type', path, this.expected, value);
  },
};

/** The body of POST /tokenize. */
export const tokenizeRequest = object({
  prompt: optional(prompt),
  messages: optional(messagesField),
  tools: toolsField,
  ...thinkingFields,
  model: optional(text()),
  add_special_tokens: optional(boolean()),
  add_generation_prompt: optional(boolean()),
  return_token_strs: optional(boolean()),
});

/** Ids are checked by `parseDetokenizeRequest`, which knows the vocabulary. */
const tokens: Field<unknown> = {
  expected: 'an array of token ids, or an array of such arrays',
  schema: {
    anyOf: [
      { type: 'array', items: { type: 'integer', minimum: 0 } },
      { type: 'array', items: { type: 'array', items: { type: 'integer', minimum: 0 } }, maxItems: maxSequenceCount },
    ],
  },
  read: (value) => value,
};

/** The body of POST /detokenize. */
export const detokenizeRequest = object({ tokens, model: optional(text()) });

/** Check a body of POST /tokenize: `prompt` (a string or an array of strings) or `messages`. */
export function parseTokenizeRequest(body: JsonObject, served: ServedModel): TokenizeCall {
  const fields = tokenizeRequest.read(body, '');
  servedModelName(fields.model, served);
  const returnTokenStrings = fields.return_token_strs ?? false;
  const given = fields.prompt;
  if (given !== undefined && fields.messages !== undefined) {
    throw new ApiError('invalid_value', 'Send either prompt or messages, not both.', { param: 'messages' });
  }
  if (fields.messages !== undefined) {
    const openAnswer = fields.add_generation_prompt ?? true;
    const conversation = { ...conversationOf(fields.messages, fields.tools, fields, served), openAnswer };
    return { kind: 'chat', conversation, returnTokenStrings };
  }
  if (given === undefined) throw missing('prompt', prompt.expected);
  if (typeof given === 'string') return { kind: 'texts', texts: [given], nested: false, returnTokenStrings };
  return { kind: 'texts', texts: given, nested: true, returnTokenStrings };
}

/** Check a body of POST /detokenize: `tokens`, an array of ids or an array of such arrays. */
export function parseDetokenizeRequest(
  body: JsonObject,
  served: ServedModel,
): { sequences: number[][]; nested: boolean } {
  const { tokens: given, model } = detokenizeRequest.read(body, '');
  servedModelName(model, served);
  if (!Array.isArray(given)) throw wrong('invalid_type', 'tokens', tokens.expected, given);
  if (!Array.isArray(given[0])) return { sequences: [readTokenIds(given, 'tokens', served)], nested: false };
  if (given.length > maxSequenceCount) throw wrong('invalid_value', 'tokens', tokens.expected, given);
  return {
    sequences: given.map((entry: unknown, index) => readTokenIds(entry, `tokens[${index}]`, served)),
    nested: true,
  };
}
