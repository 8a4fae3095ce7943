/**
 * Messages and tools to prompt text, in DeepSeek-V4's chat format, and the types of both directions.
 *
 *     <｜begin▁of▁sentence｜>[effort prefix]system text[tools]<｜User｜>…<｜Assistant｜><think>…</think>…<｜end▁of▁sentence｜>…
 *
 * No space or newline stands between turns. Follows the official encoder (`encoding/encoding_dsv4.py`) but for its
 * `task` and `response_format` messages. Special tokens are written as text; the tokenizer turns them into ids.
 * The way back, output text to reasoning, content and tool calls, is chat-parser.ts.
 */
import { readFileSync } from 'node:fs';
import { join } from 'node:path';
import { formatJson, jsonFromValue, parseJson } from './json-text.ts';
import type { Json } from './json-text.ts';

/** Text content: a string, or parts that are joined. Null is the empty string. */
export type ChatContent = string | readonly { type: 'text'; text: string }[] | null;

/** A tool call of an earlier assistant turn. `arguments` is JSON text, or the object itself. */
export interface ChatToolCall {
  id?: string | null | undefined;
  type?: string | undefined;
  function: { name: string; arguments?: string | object | null | undefined };
}

/** One message of a conversation, in the shape of the OpenAI API. Fields of other roles are ignored. */
export interface ChatMessage {
  role: 'system' | 'user' | 'assistant' | 'tool' | 'developer' | 'latest_reminder';
  content?: ChatContent | undefined;
  /** Assistant: what it thought before it answered. */
  reasoning_content?: string | null | undefined;
  /** Assistant: an empty list is the same as none. */
  tool_calls?: readonly ChatToolCall[] | null | undefined;
  /** Tool: the call that this is the result of. */
  tool_call_id?: string | null | undefined;
}

/** A tool offered to the model. Only `function` is rendered, its keys in their order. */
export interface ToolDefinition {
  type?: string;
  function: { name: string; description?: string | null; parameters?: object | null; strict?: boolean | null };
}

/** What renderChat renders. */
export interface Conversation {
  messages: readonly ChatMessage[];
  /** Stand on the leading system message. An empty list is the same as none. */
  tools?: readonly ToolDefinition[] | null | undefined;
  /** Whether the model is to reason before it answers. */
  thinking: boolean;
  /** Key of ChatEncoding.effortPrefix; an effort without a text adds nothing. Only with `thinking`. */
  reasoningEffort?: string | undefined;
  /** Leave out the reasoning of turns before the last user turn. Default true; tools force false. */
  dropThinking?: boolean | undefined;
}

/** The prose that a checkpoint was trained with, from its encoding.json. */
export interface ChatEncoding {
  /** Stands before the tool schemas. */
  readonly toolsHead: string;
  /** Stands after the tool schemas. */
  readonly toolsTail: string;
  /** Reasoning effort to the text that asks for it. */
  readonly effortPrefix: ReadonlyMap<string, string>;
}

/** A piece of a parsed answer. Pieces of one kind (and index) are joined by the receiver. Texts are never empty. */
export type ChatDelta =
  | { kind: 'reasoning'; text: string }
  | { kind: 'content'; text: string }
  /** Call number `index`, from 0, begins; once for each call, before its arguments. */
  | { kind: 'tool_name'; index: number; name: string }
  /** The next piece of the JSON text of the call's arguments. */
  | { kind: 'tool_arguments'; index: number; text: string };

/** Special tokens of the chat format, as text. The bars are U+FF5C, the low line is U+2581. */
export const CHAT_TOKENS = {
  bos: '<｜begin▁of▁sentence｜>',
  eos: '<｜end▁of▁sentence｜>',
  user: '<｜User｜>',
  assistant: '<｜Assistant｜>',
  latestReminder: '<｜latest_reminder｜>',
  thinkStart: '<think>',
  thinkEnd: '</think>',
  /** Marks the tags of tool calls: `<｜DSML｜invoke …>`. */
  dsml: '｜DSML｜',
} as const;

/** A conversation that cannot be rendered, by the caller's fault. */
export class ChatError extends Error {
  /** Index in the caller's messages; null when the fault is in the tools. */
  readonly messageIndex: number | null;

  constructor(messageIndex: number | null, message: string) {
    super(message);
    this.name = 'ChatError';
    this.messageIndex = messageIndex;
  }
}

/** Read encoding.json of the checkpoint directory `dir`. Throws if it is missing or lacks a text. */
export function loadChatEncoding(dir: string): ChatEncoding {
  const path = join(dir, 'encoding.json');
  const file = JSON.parse(readFileSync(path, 'utf8')) as Partial<EncodingFile>;
  const { tools_head: toolsHead, tools_tail: toolsTail, effort_prefix: effortPrefix } = file;
  if (typeof toolsHead !== 'string' || typeof toolsTail !== 'string') {
    throw new Error(`${path}: expected the texts tools_head and tools_tail`);
  }
  return { toolsHead, toolsTail, effortPrefix: new Map(Object.entries(effortPrefix ?? {})) };
}

/**
 * Render a conversation to the prompt that the model continues with its answer.
 *
 * The prompt ends with `<｜Assistant｜>` and `<think>` (thinking) or `</think>`. Throws ChatError for no messages, an
 * unknown role, content that is not text, and tools or arguments that are not JSON or too deeply nested.
 */
export function renderChat(encoding: ChatEncoding, conversation: Conversation): string {
  const { messages, thinking } = conversation;
  if (messages.length === 0) throw new ChatError(null, 'expected at least one message');
  const tools = conversation.tools ?? [];
  const keepThinking = thinking && (conversation.dropThinking === false || tools.length > 0);

  let turns = readTurns(messages);
  if (tools.length > 0) placeTools(turns, toolsText(encoding, tools));
  if (thinking && !keepThinking) {
    const lastAsked = turns.findLastIndex(asksModel);
    turns = turns.filter((turn, index) => turn.role !== 'developer' || index >= lastAsked);
  }
  const lastAsked = turns.findLastIndex(asksModel);

  let prompt: string = CHAT_TOKENS.bos;
  if (thinking) prompt += encoding.effortPrefix.get(conversation.reasoningEffort ?? '') ?? '';
  // Whether <｜Assistant｜> has been written and no answer has followed yet.
  let answerOpen = false;
  for (const [index, turn] of turns.entries()) {
    if (turn.role === 'assistant') {
      if (thinking && (keepThinking || index > lastAsked)) prompt += turn.reasoning + CHAT_TOKENS.thinkEnd;
      prompt += turn.text + CHAT_TOKENS.eos;
      answerOpen = false;
      continue;
    }
    prompt += TURN_START[turn.role] + turn.text;
    if (!asksModel(turn)) continue;
    const next = turns[index + 1]?.role;
    if (next === undefined || next === 'assistant' || next === 'latest_reminder') {
      prompt += answerStart(thinking && (keepThinking || index === lastAsked));
      answerOpen = true;
    }
  }
  // The official encoder opens an answer after a user turn only. A conversation that ends with a system message or with
  // an answer needs one too, or the model would have to write the tag itself.
  return answerOpen ? prompt : prompt + answerStart(thinking);
}

interface EncodingFile {
  tools_head: string;
  tools_tail: string;
  effort_prefix: Record<string, string>;
}

/** Messages as they are rendered: tool results have become user turns, tool calls have become text. */
type Turn =
  | { role: 'system' | 'user' | 'developer' | 'latest_reminder'; text: string }
  | { role: 'assistant'; text: string; reasoning: string };

const TURN_START = {
  system: '',
  user: CHAT_TOKENS.user,
  developer: CHAT_TOKENS.user,
  latest_reminder: CHAT_TOKENS.latestReminder,
};

function asksModel(turn: Turn): boolean {
  return turn.role === 'user' || turn.role === 'developer';
}

function answerStart(think: boolean): string {
  return CHAT_TOKENS.assistant + (think ? CHAT_TOKENS.thinkStart : CHAT_TOKENS.thinkEnd);
}

/** A part of a user turn. `order` is the place of its call in the assistant turn before, null for what the user wrote. */
interface UserBlock {
  text: string;
  order: number | null;
}

function readTurns(messages: readonly ChatMessage[]): Turn[] {
  const turns: Turn[] = [];
  // Blocks of consecutive user and tool messages, which become one user turn.
  let blocks: UserBlock[] = [];
  let callOrder: ReadonlyMap<string, number> = new Map();
  const endUserTurn = () => {
    if (blocks.length > 0) turns.push({ role: 'user', text: joinUserBlocks(blocks) });
    blocks = [];
  };

  for (const [index, message] of messages.entries()) {
    const { role } = message;
    switch (role) {
      case 'user':
        blocks.push({ text: contentText(message.content, index, '\n'), order: null });
        break;
      case 'tool': {
        const result = contentText(message.content, index, '\n\n');
        // An unknown call sorts as the first one, as in the official encoder.
        const order = callOrder.get(message.tool_call_id ?? '') ?? 0;
        blocks.push({ text: `<tool_result>${result}</tool_result>`, order });
        break;
      }
      case 'system':
      case 'developer':
      case 'latest_reminder':
        endUserTurn();
        turns.push({ role, text: contentText(message.content, index, '\n') });
        break;
      case 'assistant': {
        endUserTurn();
        const calls = message.tool_calls ?? [];
        let text = contentText(message.content, index, '\n');
        if (calls.length > 0) {
          text += `\n\n${toolCallsText(calls, index)}`;
          callOrder = new Map(calls.flatMap((call, order) => (call.id ? [[call.id, order] as const] : [])));
        }
        turns.push({ role, text, reasoning: message.reasoning_content ?? '' });
        break;
      }
      default:
        role satisfies never;
        throw new ChatError(index, `unknown role ${JSON.stringify(role)}`);
    }
  }
  endUserTurn();
  return turns;
}

/** Join the blocks of a user turn, its tool results in the order of their calls but in the places that results had. */
function joinUserBlocks(blocks: readonly UserBlock[]): string {
  const results = blocks.filter((block) => block.order !== null).toSorted((a, b) => a.order! - b.order!);
  let resultIndex = 0;
  return blocks.map((block) => (block.order === null ? block : results[resultIndex++]!).text).join('\n\n');
}

/** Text of a message's content. `joint` stands between its parts. */
function contentText(content: ChatContent | undefined, messageIndex: number, joint: '\n' | '\n\n'): string {
  if (content === null || content === undefined) return '';
  if (typeof content === 'string') return content;
  if (!Array.isArray(content)) throw new ChatError(messageIndex, 'expected content to be a string or a list of parts');
  return content
    .map((part: { type?: unknown; text?: unknown }) => {
      if (part?.type === 'text' && typeof part.text === 'string') return part.text;
      throw new ChatError(messageIndex, `expected content parts of type text, found ${JSON.stringify(part?.type)}`);
    })
    .join(joint);
}

/** Put the tools on the leading system message; without one, an empty one is inserted. */
function placeTools(turns: Turn[], text: string): void {
  const first = turns[0];
  if (first?.role === 'system') first.text += `\n\n${text}`;
  else turns.unshift({ role: 'system', text: `\n\n${text}` });
}

function toolsText(encoding: ChatEncoding, tools: readonly ToolDefinition[]): string {
  const schemas = tools.map((tool, index) => {
    try {
      return formatJson(jsonFromValue(tool.function));
    } catch (error) {
      if (error instanceof SyntaxError) throw new ChatError(null, `tools[${index}]: ${error.message}`);
      throw error;
    }
  });
  return encoding.toolsHead + schemas.join('\n') + encoding.toolsTail;
}

/**
 * Tool calls as the model writes them:
 *
 *     <｜DSML｜tool_calls>
 *     <｜DSML｜invoke name="FN">
 *     <｜DSML｜parameter name="P" string="true">raw text</｜DSML｜parameter>
 *     <｜DSML｜parameter name="Q" string="false">JSON</｜DSML｜parameter>
 *     </｜DSML｜invoke>
 *     </｜DSML｜tool_calls>
 *
 * A call without arguments has an empty line between its tags.
 */
function toolCallsText(calls: readonly ChatToolCall[], messageIndex: number): string {
  const { dsml } = CHAT_TOKENS;
  const invokes = calls.map((call) => {
    const parameters = [...readArguments(call.function.arguments, messageIndex)].map(([name, value]) => {
      const isString = value.kind === 'string';
      const text = isString ? value.value : formatJson(value);
      return `<${dsml}parameter name="${name}" string="${isString}">${text}</${dsml}parameter>`;
    });
    return `<${dsml}invoke name="${call.function.name}">\n${parameters.join('\n')}\n</${dsml}invoke>\n`;
  });
  return `<${dsml}tool_calls>\n${invokes.join('')}</${dsml}tool_calls>`;
}

/** Arguments of a call. Absent or empty is none; text that is not a JSON object is one parameter called `arguments`. */
function readArguments(value: string | object | null | undefined, messageIndex: number): ReadonlyMap<string, Json> {
  if (value === null || value === undefined || value === '') return new Map();
  try {
    const json = typeof value === 'string' ? parseJson(value) : jsonFromValue(value);
    if (json.kind === 'object') return json.members;
  } catch (error) {
    if (!(error instanceof SyntaxError)) throw error;
    if (typeof value !== 'string') throw new ChatError(messageIndex, `tool call arguments: ${error.message}`);
  }
  const text = typeof value === 'string' ? value : formatJson(jsonFromValue(value));
  return new Map([['arguments', { kind: 'string', value: text }]]);
}
