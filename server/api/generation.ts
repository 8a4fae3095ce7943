/**
 * What becomes of the tokens of one request on their way to the client: text without half characters,
 * stop strings found across token edges, reasoning, content and tool calls told apart, tokens counted,
 * and the reason why the answer ended. Pure.
 *
 *     token ids ─ detokenizer ─ chat parser ─ stop strings ─ deltas
 *                               (chat only)
 *
 * Tokens are taken one at a time, whatever the batches they arrive in, so every split of the token stream
 * gives the same answer, and a whole answer is the sum of its deltas.
 */
import type { ChatParser } from '../../model/chat-parser.ts';
import { CHAT_TOKENS } from '../../model/chat.ts';
import type { ChatDelta } from '../../model/chat.ts';
import type { Detokenizer } from '../../model/tokenizer.ts';

/** What is known of the choice of one token. Natural logarithms. */
export interface TokenChoice {
  id: number;
  logprob: number;
  /** The likeliest tokens with theirs, likeliest first; the chosen one need not be among them. */
  top: readonly { id: number; logprob: number }[];
}

/** A token whose choice the client wants to see: `offset` is where its shown text begins in the answer, in UTF-16 units. */
export interface LoggedToken extends TokenChoice {
  offset: number;
}

/** A piece of the answer. A completion has content only. Texts are never empty. `logged`: tokens that it shows first. */
export type AnswerDelta =
  | { kind: 'reasoning'; text: string; logged?: LoggedToken[] }
  | { kind: 'content'; text: string; logged?: LoggedToken[] }
  | { kind: 'tool_call'; index: number; id: string; name: string }
  | { kind: 'tool_arguments'; index: number; text: string };

/** The deltas of one answer, summed. */
export interface Answer {
  reasoning: string;
  content: string;
  toolCalls: { id: string; name: string; arguments: string }[];
  /** Tokens of reasoning and content in their order, where their choice was asked for. */
  logged: LoggedToken[];
}

/** Why an answer ended. `matchedStop` is the stop string or stop token id that was met, else null. */
export interface Finish {
  reason: 'stop' | 'length' | 'tool_calls';
  matchedStop: string | number | null;
}

/** Counts of one choice. Completion tokens include reasoning, tool markup and the stop token. */
export type ChoiceUsage = Pick<TokenUsage, 'completionTokens' | 'reasoningTokens'>;

/** Counts of one request: its prompts once each, and all of its choices. */
export interface TokenUsage {
  promptTokens: number;
  /** Tokens of the prompt that were not computed anew. */
  cachedTokens: number;
  completionTokens: number;
  reasoningTokens: number;
}

/** What a generation needs to know of its request. */
export interface GenerationOptions {
  /** Ids that end the answer when sampled. */
  stopTokenIds: readonly number[];
  /** Stop strings, none of them empty. */
  stop: readonly string[];
  /** The stop string, or the text of the stop token, stays in the answer. */
  keepsStop: boolean;
  /** Stop strings that end within so many tokens do not stop the answer. */
  minTokens: number;
  /** What becomes of reasoning: told apart, written before the content as the model does, or left out. */
  reasoning: 'separate' | 'inline' | 'hidden';
  /** Whether this token is left out of the answer before anything reads it (the end-of-sentence mark, say). */
  isHidden(id: number): boolean;
  detokenizer: Detokenizer;
  /** Reads reasoning and tool calls out of a chat answer; null for a completion. */
  parser: ChatParser | null;
  /** Whether the answer starts as reasoning. */
  thinking: boolean;
  /** Whether the answer is tool calls and has no content: what could still become a call is no text then. */
  onlyCalls: boolean;
  /** How many tool calls the answer may hold: 0 drops them all, 1 ends the answer before a second one. */
  maxToolCalls: number;
  /** A new id for a tool call. */
  newCallId(): string;
}

/** The answer of one request while it grows. */
export interface Generation {
  /**
   * Take the next tokens, and what is known of their choice if that was asked for; returns what they add. Once `finish`
   * is set, tokens are ignored.
   */
  push(ids: readonly number[], choices?: readonly (TokenChoice | null)[]): AnswerDelta[];
  /** The room has ended by itself: returns the text that was held back, and sets `finish`. */
  end(outcome: 'stop' | 'length'): AnswerDelta[];
  /** Set by `end`, and by `push` as soon as a stop string is met. */
  readonly finish: Finish | null;
  readonly usage: ChoiceUsage;
}

/** The tokens of one request on their way to its client; see the head of this file. */
export function createGeneration(options: GenerationOptions): Generation {
  const { detokenizer, parser, stopTokenIds, maxToolCalls } = options;
  const usage: ChoiceUsage = { completionTokens: 0, reasoningTokens: 0 };
  const matcher = createStopMatcher(options.stop);
  let textKind: 'reasoning' | 'content' = options.thinking ? 'reasoning' : 'content';
  let callsBegun = 0;
  let lastStopTokenId: number | null = null;
  let finish: Finish | null = null;
  /** Text that the detokenizer has given, the output, and text that the matcher has let go of, in UTF-16 units. */
  let outputLength = 0;
  let freeLength = 0;
  /** Stretches of the output, from `at`, that the matcher holds back: their texts together are what it holds. */
  const held: { at: number; length: number }[] = [];
  /** Tokens that no text was shown of, and the stretch of the output from `start` to `end` that they had a part in. */
  const unshown: { choice: TokenChoice; start: number; end: number }[] = [];

  /** End the answer here; nothing that comes later is read. */
  function finishNow(reason: 'stop' | 'length', matchedStop: string | number | null): void {
    const hasToolCall = maxToolCalls > 0 && parser !== null && parser.toolCallCount > 0;
    finish = { reason: reason === 'stop' && hasToolCall ? 'tool_calls' : reason, matchedStop };
  }

  /** The tokens that first show text in the next `length` units of the answer, which the output has at `at`. */
  function takeShown(at: number, length: number): LoggedToken[] {
    const logged: LoggedToken[] = [];
    forgetBefore(at);
    while (unshown.length > 0 && unshown[0]!.start < at + length) {
      const { choice, start } = unshown.shift()!;
      logged.push({ ...choice, offset: freeLength + Math.max(0, start - at) });
    }
    freeLength += length;
    return logged;
  }

  /** Drop the tokens that have no part in the output from `at` on. */
  function forgetBefore(at: number): void {
    while (unshown.length > 0 && unshown[0]!.end <= at) unshown.shift();
  }

  /** Drop the tokens that can show nothing any more. */
  function forgetSettled(): void {
    let settled = held[0]?.at ?? parser?.settledLength ?? outputLength;
    // The mark that closes the reasoning is written with the content behind it.
    if (options.reasoning === 'inline' && textKind === 'reasoning') {
      settled = Math.min(settled, parser?.thinkEndAt ?? settled);
    }
    forgetBefore(settled);
  }

  /** Text of the answer that no stop string can take back, with the tokens that it shows first. */
  function show(kind: 'reasoning' | 'content', text: string, deltas: AnswerDelta[]): void {
    if (text === '') return;
    const logged: LoggedToken[] = [];
    const isShown = kind === 'reasoning' ? options.reasoning !== 'hidden' : !options.onlyCalls;
    for (let left = text.length; left > 0;) {
      const stretch = held[0]!;
      const length = Math.min(left, stretch.length);
      if (isShown) logged.push(...takeShown(stretch.at, length));
      left -= length;
      stretch.at += length;
      stretch.length -= length;
      if (stretch.length === 0) held.shift();
    }
    if (!isShown) return;
    const shownKind = options.reasoning === 'inline' ? 'content' : kind;
    appendDelta(deltas, { kind: shownKind, text, ...(logged.length === 0 ? {} : { logged }) });
  }

  /** Pass on what the stop matcher held back: no stop string continues past here. */
  function releaseHeldText(deltas: AnswerDelta[]): void {
    show(textKind, matcher.flush(), deltas);
  }

  function endReasoning(deltas: AnswerDelta[]): void {
    if (textKind === 'content') return;
    releaseHeldText(deltas);
    textKind = 'content';
    if (options.reasoning !== 'inline') return;
    const text = CHAT_TOKENS.thinkEnd;
    // A call inside the reasoning closes it without a mark of the model's own.
    const at = parser?.thinkEndAt ?? null;
    const logged = at === null ? [] : takeShown(at, text.length);
    appendDelta(deltas, { kind: 'content', text, ...(logged.length === 0 ? {} : { logged }) });
  }

  /** `text` stands in the output at `at`. */
  function takeText(kind: 'reasoning' | 'content', text: string, at: number, deltas: AnswerDelta[]): void {
    if (kind === 'content') endReasoning(deltas);
    held.push({ at, length: text.length });
    const { free, matched } = matcher.push(text, usage.completionTokens <= options.minTokens);
    show(kind, matched !== null && options.keepsStop ? free + matched : free, deltas);
    if (matched !== null) finishNow('stop', matched);
  }

  function takeChatDelta(delta: ChatDelta, deltas: AnswerDelta[]): void {
    switch (delta.kind) {
      case 'reasoning':
      case 'content':
        return takeText(delta.kind, delta.text, delta.at, deltas);
      case 'tool_name':
        endReasoning(deltas);
        releaseHeldText(deltas);
        if (maxToolCalls === 0) return;
        if (callsBegun === maxToolCalls) return finishNow('stop', null);
        callsBegun += 1;
        return appendDelta(deltas, {
          kind: 'tool_call',
          index: delta.index,
          id: options.newCallId(),
          name: delta.name,
        });
      case 'tool_arguments':
        if (maxToolCalls === 0) return;
        return appendDelta(deltas, { kind: 'tool_arguments', index: delta.index, text: delta.text });
      default:
        delta satisfies never;
    }
  }

  function takeDecoded(text: string, deltas: AnswerDelta[]): void {
    if (text === '') return;
    const at = outputLength;
    outputLength += text.length;
    if (parser === null) return takeText('content', text, at, deltas);
    for (const delta of parser.push(text)) {
      if (finish === null) takeChatDelta(delta, deltas);
    }
  }

  return {
    push(ids, choices) {
      const deltas: AnswerDelta[] = [];
      for (const [index, id] of ids.entries()) {
        if (finish !== null) break;
        usage.completionTokens += 1;
        const isStop = stopTokenIds.includes(id);
        if (isStop) lastStopTokenId = id;
        if (!options.isHidden(id)) {
          const choice = choices?.[index] ?? null;
          const findsBytes = choice !== null && detokenizer.holdsBytes;
          const text = detokenizer.push(id);
          if (choice !== null) {
            // The code point that the token leaves incomplete is its text too; a token without text shows nowhere.
            const end = outputLength + text.length + (detokenizer.holdsBytes ? 1 : 0);
            // One that it findsBytes incomplete and does not go on with is none of it.
            const breaks = findsBytes && text.startsWith('\ufffd') && end > outputLength + 1;
            const start = breaks ? outputLength + 1 : outputLength;
            if (end > start) unshown.push({ choice, start, end });
          }
          takeDecoded(text, deltas);
          forgetSettled();
        }
        // The mark that closes the reasoning still counts as reasoning: no content has come of it yet.
        if (textKind === 'reasoning' && !isStop) usage.reasoningTokens += 1;
      }
      return deltas;
    },

    end(outcome) {
      const deltas: AnswerDelta[] = [];
      if (finish !== null) return deltas;
      takeDecoded(detokenizer.flush(), deltas);
      for (const delta of parser === null ? [] : parser.end(outcome === 'stop')) {
        if (finish === null) takeChatDelta(delta, deltas);
      }
      if (finish !== null) return deltas;
      releaseHeldText(deltas);
      finishNow(outcome, outcome === 'stop' ? lastStopTokenId : null);
      return deltas;
    },

    get finish() {
      return finish;
    },
    usage,
  };
}

/** Add `delta` to the end of `deltas`, joined to the last one where both are text of one kind. */
export function appendDelta(deltas: AnswerDelta[], delta: AnswerDelta): void {
  if (delta.kind === 'tool_call') {
    deltas.push(delta);
    return;
  }
  if (delta.text === '') return;
  const last = deltas.at(-1);
  if (last === undefined || last.kind === 'tool_call' || last.kind !== delta.kind) {
    deltas.push(copyOf(delta));
    return;
  }
  if (last.kind === 'tool_arguments' && delta.kind === 'tool_arguments' && last.index !== delta.index) {
    deltas.push({ ...delta });
    return;
  }
  last.text += delta.text;
  if (delta.kind === 'tool_arguments' || last.kind === 'tool_arguments' || delta.logged === undefined) return;
  (last.logged ??= []).push(...delta.logged);
}

/** A copy that can grow on its own. */
function copyOf<D extends Exclude<AnswerDelta, { kind: 'tool_call' }>>(delta: D): D {
  return 'logged' in delta && delta.logged !== undefined ? { ...delta, logged: [...delta.logged] } : { ...delta };
}

/** The sum of `deltas`: what a client that does not stream gets. */
export function sumDeltas(deltas: readonly AnswerDelta[]): Answer {
  const answer: Answer = { reasoning: '', content: '', toolCalls: [], logged: [] };
  for (const delta of deltas) {
    switch (delta.kind) {
      case 'reasoning':
      case 'content':
        answer[delta.kind] += delta.text;
        answer.logged.push(...(delta.logged ?? []));
        break;
      case 'tool_call':
        answer.toolCalls[delta.index] = { id: delta.id, name: delta.name, arguments: '' };
        break;
      case 'tool_arguments': {
        const call = answer.toolCalls[delta.index];
        if (call !== undefined) call.arguments += delta.text;
        break;
      }
      default:
        delta satisfies never;
    }
  }
  return answer;
}

/** Finds stop strings in text that arrives in pieces. */
interface StopMatcher {
  /**
   * Text that can no longer be part of a stop string, and the stop string that has just ended, if any; with
   * `ignoresEnds`, those that end in this text do not count.
   */
  push(text: string, ignoresEnds?: boolean): { free: string; matched: string | null };
  /** What was held back, as no more text follows; the next text starts afresh. */
  flush(): string;
}

/**
 * Matcher for `stops`: the one that ends first wins, at an equal end the longest, and the text before it is
 * free. Every stop string has its own Knuth-Morris-Pratt automaton, so the cost is linear in the text and
 * the longest suffix that may still become a stop string is the largest state.
 */
export function createStopMatcher(stops: readonly string[]): StopMatcher {
  const automata = stops.map((stop) => ({ stop, fallback: fallbackTable(stop), state: 0 }));
  let held = '';

  return {
    push(text, ignoresEnds = false) {
      if (automata.length === 0) return { free: text, matched: null };
      const pending = held + text;
      for (let position = held.length; position < pending.length; position += 1) {
        let matched: string | null = null;
        for (const automaton of automata) {
          const { stop, fallback } = automaton;
          const unit = pending[position];
          let state = automaton.state;
          while (state > 0 && stop[state] !== unit) state = fallback[state - 1]!;
          if (stop[state] === unit) state += 1;
          automaton.state = state;
          if (state < stop.length) continue;
          if (ignoresEnds) automaton.state = fallback[state - 1]!;
          else if (stop.length > (matched?.length ?? 0)) matched = stop;
        }
        if (matched !== null) return { free: pending.slice(0, position + 1 - matched.length), matched };
      }
      const holdLength = Math.max(...automata.map((automaton) => automaton.state));
      held = pending.slice(pending.length - holdLength);
      return { free: pending.slice(0, pending.length - holdLength), matched: null };
    },

    flush() {
      const text = held;
      held = '';
      for (const automaton of automata) automaton.state = 0;
      return text;
    },
  };
}

/** For each length of a matched beginning of `pattern`, less one: the length of its longest proper border. */
function fallbackTable(pattern: string): number[] {
  const table = [0];
  let length = 0;
  for (let position = 1; position < pattern.length; position += 1) {
    while (length > 0 && pattern[position] !== pattern[length]) length = table[length - 1]!;
    if (pattern[position] === pattern[length]) length += 1;
    table.push(length);
  }
  return table;
}
