/** Prompts to token ids: conversations rendered, texts encoded, what cannot fit refused before it costs anything. */
import { ChatError, promptText, renderChat } from '../../model/chat.ts';
import type { ChatEncoding, Conversation } from '../../model/chat.ts';
import type { PromptPiece, Tokenizer } from '../../model/tokenizer.ts';
import { ApiError } from '../errors.ts';
import type { Prompt } from './dialect.ts';
import type { EncodeAside } from './encoder.ts';

/** A longer text is encoded aside: at 2 µs a character this one holds the event loop for 8 ms. */
const longestInlineText = 4096;

/** What turns prompts into ids. */
export interface PromptReader {
  tokenizer: Tokenizer;
  /** For long prompts; without it they hold the event loop. */
  encodeAside?: EncodeAside;
  chat: ChatEncoding;
  /** Whether special tokens in what clients put into conversations are special. Without it they are plain text. */
  allowsSpecialTokens?: boolean;
  contextLength: number;
  /** No token is longer; bounds the token count of a text from below before it is encoded. */
  longestTokenBytes: number;
}

/**
 * Token ids of a prompt; null once `signal` is aborted, if that is soon enough. Rejects with an `ApiError` naming `param`
 * where there is a fault in it, or too much of it.
 */
export async function promptTokens(
  reader: PromptReader,
  prompt: Prompt,
  param: string,
  signal: AbortSignal,
): Promise<number[] | null> {
  switch (prompt.kind) {
    case 'ids':
      return prompt.ids;
    case 'text':
      return encode(reader, prompt.text, param, signal);
    case 'conversation':
      return encode(reader, renderPrompt(reader.chat, prompt.conversation), param, signal);
    default:
      return prompt satisfies never;
  }
}

/** The prompt of a conversation; a fault in it is a 400 that names the message. */
function renderPrompt(chat: ChatEncoding, conversation: Conversation): PromptPiece[] {
  try {
    return renderChat(chat, conversation);
  } catch (error) {
    if (!(error instanceof ChatError)) throw error;
    const param = error.messageIndex === null ? 'tools' : `messages[${error.messageIndex}]`;
    throw new ApiError('invalid_value', `${param}: ${error.message}.`, { param, cause: error });
  }
}

/**
 * Ids of `prompt`. A prompt that cannot fit the context is refused before it is encoded, which takes about 2 µs a
 * character, and a body may hold many millions.
 */
function encode(
  reader: PromptReader,
  prompt: string | readonly PromptPiece[],
  param: string,
  signal: AbortSignal,
): number[] | Promise<number[] | null> {
  const text = typeof prompt === 'string' ? prompt : promptText(prompt);
  const leastCount = Math.ceil(text.length / reader.longestTokenBytes);
  if (leastCount > reader.contextLength) {
    throw new ApiError(
      'context_length_exceeded',
      `This model's maximum context length is ${reader.contextLength} tokens. ` +
        `However, your prompt has at least ${leastCount} tokens. Please shorten the prompt.`,
      { param },
    );
  }
  const given = reader.allowsSpecialTokens === true ? text : prompt;
  if (text.length <= longestInlineText || reader.encodeAside === undefined) return reader.tokenizer.encode(given);
  return reader.encodeAside(given, signal);
}

/** The most bytes that one token of the vocabulary has. */
export function longestTokenBytes(tokenizer: Tokenizer): number {
  let longest = 1;
  for (let id = 0; id < tokenizer.vocabSize; id += 1) longest = Math.max(longest, tokenizer.tokenBytes(id).length);
  return longest;
}
