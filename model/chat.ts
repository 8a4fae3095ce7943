/**
 * Messages and tools to prompt text, in DeepSeek-V4's chat format, and the types of both directions.
 *
 *     <｜begin▁of▁sentence｜>[effort prefix]system text[tools]<｜User｜>…<｜Assistant｜><think>…</think>…<｜end▁of▁sentence｜>…
 *
 * No space or newline stands between turns. Follows the official encoder (`encoding/encoding_dsv4.py`). The prompt is a
 * list of pieces: special tokens come only from what this file or the checkpoint writes, never from what a client sends
 * (tokenizer.ts, PromptPiece). The way back, output text to reasoning, content and tool calls, is chat-parser.ts.
 */
import { readFileSync } from 'node:fs';
import { join } from 'node:path';
import { formatJson, jsonFromValue, MAX_JSON_VALUES, parseJson } from './json-text.ts';
import type { Json, JsonBudget } from './json-text.ts';
import type { PromptPiece } from './tokenizer.ts';

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
  /** A job for the model that is no answer to the user: its token ends the message. */
  task?: keyof typeof TASK_TOKENS | null | undefined;
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
  /** JSON schema that the answer is to follow; stands on the leading system message where the checkpoint has a text. */
  responseSchema?: object | null | undefined;
  /** Open the answer that the model is to write. Default true. */
  openAnswer?: boolean | undefined;
  /**
   * Leave the last message, an assistant's without tool calls, open, so that the model goes on with its content. Default
   * false. No answer is opened then.
   */
  continueFinalMessage?: boolean | undefined;
}

/** The prose that a checkpoint was trained with, from its encoding.json. */
export interface ChatEncoding {
  /** Stands before the tool schemas. */
  readonly toolsHead: string;
  /** Stands after the tool schemas. */
  readonly toolsTail: string;
  /** Reasoning effort to the text that asks for it. */
  readonly effortPrefix: ReadonlyMap<string, string>;
  /** Asks for an answer that follows a schema, which stands where this has SCHEMA_MARK; null: nothing is added. */
  readonly responseFormat: string | null;
}

/**
 * A piece of a parsed answer. Pieces of one kind (and index) are joined by the receiver. Texts are never empty. `at` is
 * where reasoning and content begin in the output of the model, in UTF-16 units: they stand there as they are here.
 */
export type ChatDelta =
  | { kind: 'reasoning'; text: string; at: number }
  | { kind: 'content'; text: string; at: number }
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

/** Tokens of the jobs that a message may carry. */
export const TASK_TOKENS = {
  action: '<｜action｜>',
  query: '<｜query｜>',
  authority: '<｜authority｜>',
  domain: '<｜domain｜>',
  title: '<｜title｜>',
  read_url: '<｜read_url｜>',
} as const;

/** Where the schema stands in ChatEncoding.responseFormat. */
export const SCHEMA_MARK = '{schema}';

/** A conversation that cannot be rendered, by the caller's fault. */
export class ChatError extends Error {
  /** Index in the caller's messages; null when the fault is in the tools or the schema. */
  readonly messageIndex: number | null;

  constructor(messageIndex: number | null, message: string) {
    super(message);
    this.name = 'ChatError';
    this.messageIndex = messageIndex;
  }
}

/** Contents of encoding.json, our carrier of a checkpoint's fixed texts. */
export interface EncodingFile {
  tools_head: string;
  tools_tail: string;
  effort_prefix: Record<string, string>;
  response_format?: string;
}

/** Read encoding.json of the checkpoint directory `dir`. Throws if it is missing or lacks a text. */
export function loadChatEncoding(dir: string): ChatEncoding {
  const path = join(dir, 'encoding.json');
  let text: string;
  try {
    text = readFileSync(path, 'utf8');
  } catch (error) {
    if ((error as NodeJS.ErrnoException).code !== 'ENOENT') throw error;
    throw new Error(`${path} is missing; make it with: handoff import-encoding ${dir}`, { cause: error });
  }
  const file = JSON.parse(text) as Partial<EncodingFile>;
  const { tools_head: toolsHead, tools_tail: toolsTail, response_format: responseFormat = null } = file;
  if (typeof toolsHead !== 'string' || typeof toolsTail !== 'string') {
    throw new Error(`${path}: expected the texts tools_head and tools_tail`);
  }
  if (responseFormat !== null && !responseFormat.includes(SCHEMA_MARK)) {
    throw new Error(`${path}: expected ${SCHEMA_MARK} in response_format`);
  }
  return { toolsHead, toolsTail, responseFormat, effortPrefix: new Map(Object.entries(file.effort_prefix ?? {})) };
}

/**
 * Render a conversation to the prompt that the model continues with its answer.
 *
 * The prompt ends with `<｜Assistant｜>` and `<think>` (thinking) or `</think>`, unless the conversation says otherwise.
 * Throws ChatError for no messages, an unknown role, content that is not text, tools or arguments that are not JSON or
 * too deeply nested, and a final message that cannot be continued.
 */
export function renderChat(encoding: ChatEncoding, conversation: Conversation): PromptPiece[] {
  const { messages, thinking } = conversation;
  if (messages.length === 0) throw new ChatError(null, 'expected at least one message');
  const tools = conversation.tools ?? [];
  const keepThinking = thinking && (conversation.dropThinking === false || tools.length > 0);
  const isContinued = conversation.continueFinalMessage === true;
  if (isContinued) checkContinued(messages);

  const budget: JsonBudget = { valuesLeft: MAX_JSON_VALUES };
  let turns = readTurns(messages, budget);
  if (tools.length > 0) extendSystem(turns, toolsPieces(encoding, tools, budget));
  const { responseSchema } = conversation;
  if (responseSchema && encoding.responseFormat !== null) {
    extendSystem(turns, responseFormatPieces(encoding.responseFormat, responseSchema, budget));
  }
  if (thinking && !keepThinking) {
    const lastAsked = turns.findLastIndex(asksModel);
    turns = turns.filter((turn, index) => turn.role !== 'developer' || index >= lastAsked);
  }
  const lastAsked = turns.findLastIndex(asksModel);

  const prompt: PromptPiece[] = [trusted(CHAT_TOKENS.bos)];
  if (thinking) prompt.push(trusted(encoding.effortPrefix.get(conversation.reasoningEffort ?? '') ?? ''));
  // Whether <｜Assistant｜> or a task has been written and no answer has followed yet.
  let answerOpen = false;
  for (const [index, turn] of turns.entries()) {
    if (turn.role === 'assistant') {
      const answersTask = turns[index - 1]?.task !== undefined;
      if (thinking && !answersTask && (keepThinking || index > lastAsked)) {
        prompt.push(plain(turn.reasoning), trusted(CHAT_TOKENS.thinkEnd));
      }
      prompt.push(...turn.pieces);
      answerOpen = isContinued && index === turns.length - 1;
      if (!answerOpen) prompt.push(trusted(CHAT_TOKENS.eos));
    } else {
      prompt.push(trusted(TURN_START[turn.role]), ...turn.pieces);
    }
    const next = turns[index + 1]?.role;
    if (next !== undefined && next !== 'assistant' && next !== 'latest_reminder') continue;
    if (next === undefined && conversation.openAnswer === false) break;
    if (turn.task !== undefined) {
      if (turn.task === 'action') prompt.push(trusted(answerStart(thinking)));
      prompt.push(trusted(TASK_TOKENS[turn.task]));
      answerOpen = true;
    } else if (asksModel(turn)) {
      prompt.push(trusted(answerStart(thinking && (keepThinking || index === lastAsked))));
      answerOpen = true;
    }
  }
  // The official encoder opens an answer after a user turn only. A conversation that ends with a system message or with
  // an answer needs one too, or the model would have to write the tag itself.
  if (!answerOpen && conversation.openAnswer !== false) prompt.push(trusted(answerStart(thinking)));
  return joined(prompt);
}

/** The text of a prompt, all of its pieces in a row. */
export function promptText(prompt: readonly PromptPiece[]): string {
  return prompt.map((piece) => piece.text).join('');
}

/** Messages as they are rendered: tool results have become user turns, tool calls have become text. */
type Turn = { pieces: PromptPiece[]; task: keyof typeof TASK_TOKENS | undefined } & (
  | { role: 'system' | 'user' | 'developer' | 'latest_reminder' }
  | { role: 'assistant'; reasoning: string }
);

const TURN_START = {
  system: '',
  user: CHAT_TOKENS.user,
  developer: CHAT_TOKENS.user,
  latest_reminder: CHAT_TOKENS.latestReminder,
};

/** Text of ours or of the checkpoint. */
function trusted(text: string): PromptPiece {
  return { text, trusted: true };
}

/** Text of the client. */
function plain(text: string): PromptPiece {
  return { text, trusted: false };
}

/** The same pieces without empty ones, neighbours of one kind as one. */
function joined(pieces: readonly PromptPiece[]): PromptPiece[] {
  const result: { text: string; trusted: boolean }[] = [];
  for (const piece of pieces) {
    const last = result.at(-1);
    if (piece.text === '') continue;
    if (last?.trusted === piece.trusted) last.text += piece.text;
    else result.push({ ...piece });
  }
  return result;
}

function asksModel(turn: Turn): boolean {
  return turn.role === 'user' || turn.role === 'developer';
}

function answerStart(think: boolean): string {
  return CHAT_TOKENS.assistant + (think ? CHAT_TOKENS.thinkStart : CHAT_TOKENS.thinkEnd);
}

function checkContinued(messages: readonly ChatMessage[]): void {
  const index = messages.length - 1;
  const last = messages[index]!;
  if (last.role !== 'assistant') throw new ChatError(index, 'expected an assistant message to continue');
  if ((last.tool_calls ?? []).length > 0) throw new ChatError(index, 'a message with tool calls cannot be continued');
}

/** A part of a user turn. `order` is the place of its call in the assistant turn before, null for what the user wrote. */
interface UserBlock {
  pieces: PromptPiece[];
  order: number | null;
}

function readTurns(messages: readonly ChatMessage[], budget: JsonBudget): Turn[] {
  const turns: Turn[] = [];
  // Blocks of consecutive user and tool messages, which become one user turn with the task of its first message.
  let blocks: UserBlock[] = [];
  let blocksTask: Turn['task'];
  let callOrder: ReadonlyMap<string, number> = new Map();
  const endUserTurn = () => {
    if (blocks.length > 0) turns.push({ role: 'user', pieces: joinUserBlocks(blocks), task: blocksTask });
    blocks = [];
    blocksTask = undefined;
  };

  for (const [index, message] of messages.entries()) {
    const { role } = message;
    const task = readTask(message, index);
    switch (role) {
      case 'user':
        if (blocksTask !== undefined) endUserTurn();
        if (blocks.length === 0) blocksTask = task;
        blocks.push({ pieces: [plain(contentText(message.content, index, '\n'))], order: null });
        break;
      case 'tool': {
        const result = plain(contentText(message.content, index, '\n\n'));
        // An unknown call sorts as the first one, as in the official encoder.
        const order = callOrder.get(message.tool_call_id ?? '') ?? 0;
        blocks.push({ pieces: [trusted('<tool_result>'), result, trusted('</tool_result>')], order });
        break;
      }
      case 'system':
      case 'developer':
      case 'latest_reminder':
        endUserTurn();
        turns.push({ role, pieces: [plain(contentText(message.content, index, '\n'))], task });
        break;
      case 'assistant': {
        endUserTurn();
        const calls = message.tool_calls ?? [];
        const pieces = [plain(contentText(message.content, index, '\n'))];
        if (calls.length > 0) {
          pieces.push(trusted('\n\n'), ...toolCallsPieces(calls, index, budget));
          callOrder = new Map(calls.flatMap((call, order) => (call.id ? [[call.id, order] as const] : [])));
        }
        turns.push({ role, pieces, task, reasoning: message.reasoning_content ?? '' });
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

function readTask({ task }: ChatMessage, index: number): Turn['task'] {
  if (task === undefined || task === null) return undefined;
  if (!Object.hasOwn(TASK_TOKENS, task)) throw new ChatError(index, `unknown task ${JSON.stringify(task)}`);
  return task;
}

/** Join the blocks of a user turn, its tool results in the order of their calls but in the places that results had. */
function joinUserBlocks(blocks: readonly UserBlock[]): PromptPiece[] {
  const results = blocks.filter((block) => block.order !== null).toSorted((a, b) => a.order! - b.order!);
  let resultIndex = 0;
  return blocks.flatMap((block, index) => {
    const { pieces } = block.order === null ? block : results[resultIndex++]!;
    return index === 0 ? pieces : [trusted('\n\n'), ...pieces];
  });
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

/** Put `pieces` on the leading system message; without one, an empty one is inserted. */
function extendSystem(turns: Turn[], pieces: readonly PromptPiece[]): void {
  if (turns[0]?.role !== 'system') turns.unshift({ role: 'system', pieces: [], task: undefined });
  turns[0]!.pieces.push(trusted('\n\n'), ...pieces);
}

function toolsPieces(encoding: ChatEncoding, tools: readonly ToolDefinition[], budget: JsonBudget): PromptPiece[] {
  const schemas = tools.map((tool, index) => jsonText(tool.function, `tools[${index}]`, budget));
  return [trusted(encoding.toolsHead), plain(schemas.join('\n')), trusted(encoding.toolsTail)];
}

function responseFormatPieces(text: string, schema: object, budget: JsonBudget): PromptPiece[] {
  const markIndex = text.indexOf(SCHEMA_MARK);
  return [
    trusted(text.slice(0, markIndex)),
    plain(jsonText(schema, 'the schema of the answer', budget)),
    trusted(text.slice(markIndex + SCHEMA_MARK.length)),
  ];
}

function jsonText(value: unknown, name: string, budget: JsonBudget): string {
  try {
    return formatJson(jsonFromValue(value, budget));
  } catch (error) {
    if (error instanceof SyntaxError || error instanceof RangeError)
      throw new ChatError(null, `${name}: ${error.message}`);
    throw error;
  }
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
function toolCallsPieces(calls: readonly ChatToolCall[], messageIndex: number, budget: JsonBudget): PromptPiece[] {
  const { dsml } = CHAT_TOKENS;
  const pieces = [trusted(`<${dsml}tool_calls>\n`)];
  for (const call of calls) {
    pieces.push(trusted(`<${dsml}invoke name="`), plain(call.function.name), trusted('">\n'));
    for (const [index, [name, value]] of [...readArguments(call.function.arguments, messageIndex, budget)].entries()) {
      const isString = value.kind === 'string';
      pieces.push(
        trusted(`${index === 0 ? '' : '\n'}<${dsml}parameter name="`),
        plain(name),
        trusted(`" string="${isString}">`),
        plain(isString ? value.value : formatJson(value)),
        trusted(`</${dsml}parameter>`),
      );
    }
    pieces.push(trusted(`\n</${dsml}invoke>\n`));
  }
  pieces.push(trusted(`</${dsml}tool_calls>`));
  return pieces;
}

/** Arguments of a call. Absent or empty is none; text that is not a JSON object is one parameter called `arguments`. */
function readArguments(
  value: string | object | null | undefined,
  messageIndex: number,
  budget: JsonBudget,
): ReadonlyMap<string, Json> {
  if (value === null || value === undefined || value === '') return new Map();
  try {
    const json = typeof value === 'string' ? parseJson(value, budget) : jsonFromValue(value, budget);
    if (json.kind === 'object') return json.members;
  } catch (error) {
    const isTextFault = typeof value === 'string' && error instanceof SyntaxError;
    if (!isTextFault && (error instanceof SyntaxError || error instanceof RangeError)) {
      throw new ChatError(messageIndex, `tool call arguments: ${error.message}`);
    }
    if (!isTextFault) throw error;
  }
  const text = typeof value === 'string' ? value : formatJson(jsonFromValue(value));
  return new Map([['arguments', { kind: 'string', value: text }]]);
}
