/**
 * Output text to reasoning, content and tool calls, while it arrives.
 *
 *     start ─▶ reasoning ─▶ content ─▶ block ◀─▶ invokeName ─▶ invoke ◀─▶ parameterHeader ─▶ string | json
 *                  └───────────────────▲ │                                                  (back to invoke)
 *                                        └─▶ done
 *
 * Each state looks for its own markers; what cannot be part of one is passed on at once, a tail that could become one
 * is held back. So every split of the output gives the same answer, and markup never shows as text. Follows the
 * official parser for what the trained format is, and is lenient where models and public servers have been seen to
 * stray: calls inside the reasoning, no wrapper tags, unclosed invokes, JSON in the place of parameters, ASCII bars.
 * Later checkpoints write `<｜DSML｜ calls>` and a space in every other tag; both ways are read, whatever the checkpoint.
 */
import { CHAT_TOKENS } from './chat.ts';
import type { ChatDelta } from './chat.ts';

/** Reads one answer. Feed every piece of text to `push`, then call `end` once. */
export interface ChatParser {
  /**
   * Deltas that `text`, the next piece of the output without the end token, completes. Neighbours are merged, unless
   * dropped markup lies between them.
   */
  push(text: string): ChatDelta[];
  /**
   * Deltas of the text still held back. Markup of a truncated tool block is dropped, open JSON stays open. Where the
   * model ended by itself (`stopped`), a call that lacks nothing but its closing tags is complete.
   */
  end(stopped: boolean): ChatDelta[];
  /** Tool calls read to their end so far: above 0, the answer's finish reason is `tool_calls`. */
  readonly toolCallCount: number;
  /** Where the mark that closed the reasoning begins in the output, in UTF-16 units; null where none has come. */
  readonly thinkEndAt: number | null;
  /** How much of the output, in UTF-16 units, is passed on or dropped: what comes behind it is held back. */
  readonly settledLength: number;
}

/**
 * Make a parser for one answer.
 *
 * `thinking` says that the prompt ended with `<think>`: the answer begins as reasoning. `tools` says that calls are
 * looked for: without it their markup is text. The arguments of a call are assembled as text, `{"k": v, …}`, where a
 * string parameter is escaped and any other is passed as the model wrote it, or as a string if it is not JSON. A
 * repeated parameter is written again: JSON readers keep the last.
 */
export function createChatParser(options: { thinking: boolean; tools: boolean }): ChatParser {
  return new Parser(options.thinking, options.tools);
}

type State =
  | 'start'
  | 'reasoning'
  | 'content'
  | 'block'
  | 'invokeName'
  | 'invoke'
  | 'parameterHeader'
  | 'string'
  | 'json'
  | 'done';

/** What a marker means; the texts that mean the same differ in their bars, blanks and names. */
type Marker =
  | 'thinkEnd'
  | 'blockStart'
  | 'blockEnd'
  | 'invokeStart'
  | 'invokeEnd'
  | 'parameterStart'
  | 'parameterEnd'
  | 'headerEnd'
  | 'stray'
  | 'anyTag';

/** `<｜DSML｜` in its four ways, then `rest`; with `slash` a closing tag. */
function tags(rest: string, slash: '' | '/' = ''): string[] {
  return [CHAT_TOKENS.dsml, '|DSML|'].flatMap((mark) => [`<${slash}${mark}${rest}`, `<${slash}${mark} ${rest}`]);
}

/** The tags with the line ends before them, which belong to the first tag of a block. */
function withBreak(texts: readonly string[]): string[] {
  return texts.flatMap((text) => [`\n\n${text}`, text]);
}

/** Texts that a state looks for. None may begin inside another, unless both end together. */
interface Markers {
  readonly meanings: ReadonlyMap<string, Marker>;
  /** Finds the first of them in one pass. */
  readonly pattern: RegExp;
  readonly texts: readonly string[];
  readonly firstUnits: ReadonlySet<string>;
  readonly maxLength: number;
}

/** Markers to look for; none at all match nowhere. */
function markers(table: Partial<Record<Marker, readonly string[]>>): Markers {
  const entries = Object.entries(table) as [Marker, readonly string[]][];
  const meanings = new Map(entries.flatMap(([meaning, texts]) => texts.map((text) => [text, meaning] as const)));
  const texts = [...meanings.keys()];
  return {
    meanings,
    texts,
    // The bar of an ASCII tag is the only character that patterns treat specially.
    pattern: new RegExp(texts.length === 0 ? '(?!)' : texts.map((text) => text.replaceAll('|', '\\|')).join('|')),
    firstUnits: new Set(texts.map((text) => text[0]!)),
    maxLength: Math.max(0, ...texts.map((text) => text.length)),
  };
}

const BLOCK_STARTS = [...tags('tool_calls>'), ...tags('calls>')];
const BLOCK_ENDS = [...tags('tool_calls>', '/'), ...tags('calls>', '/')];
const INVOKE_STARTS = tags('invoke name=');
const INVOKE_ENDS = tags('invoke>', '/');
const PARAMETER_STARTS = tags('parameter name=');
/** What begins a block, and closing tags that close nothing, which are no text either. */
const OUTSIDE = {
  blockStart: withBreak(BLOCK_STARTS),
  invokeStart: withBreak(INVOKE_STARTS),
  stray: [...BLOCK_ENDS, ...INVOKE_ENDS, ...tags('parameter>', '/')],
};

const IN_REASONING = markers({ thinkEnd: [CHAT_TOKENS.thinkEnd] });
const IN_REASONING_WITH_TOOLS = markers({ thinkEnd: [CHAT_TOKENS.thinkEnd], ...OUTSIDE });
const IN_CONTENT = markers({});
const IN_CONTENT_WITH_TOOLS = markers(OUTSIDE);
const IN_BLOCK = markers({ invokeStart: INVOKE_STARTS, blockEnd: BLOCK_ENDS });
/** A header ends with its last attribute's quote and the bracket; any tag says that this one was left unfinished. */
const IN_HEADER = markers({
  headerEnd: ['">'],
  anyTag: [CHAT_TOKENS.dsml, '|DSML|'].flatMap((m) => [`<${m}`, `</${m}`]),
});
const IN_INVOKE = markers({
  parameterStart: PARAMETER_STARTS,
  invokeEnd: INVOKE_ENDS,
  invokeStart: INVOKE_STARTS,
  blockEnd: BLOCK_ENDS,
});
/** A value may hold anything but the closing tag written as its opening tag is. */
const IN_PARAMETER = new Map(
  PARAMETER_STARTS.map((start) => {
    const end = start.replace('<', '</').replace(' name=', '>');
    return [start, markers({ parameterEnd: [end] })] as const;
  }),
);
/** What tells an unfinished tag at the end of an answer from a lone `<` or `<|`. */
const TAG_BEGINNING = /<\/?(?:｜|\|D)/;

/** The beginning of a tag that is no closing one. */
const OPEN_TAG = /^<(?!\/)/;

class Parser implements ChatParser {
  toolCallCount = 0;
  thinkEndAt: number | null = null;
  readonly #tools: boolean;
  #state: State;
  /** Text not yet consumed; between pushes never longer than a marker. */
  #buffer = '';
  /** All text that was pushed, in UTF-16 units. */
  #pushedLength = 0;
  #deltas: ChatDelta[] = [];
  /** Calls begun, so the current one's index is one less. */
  #callsBegun = 0;
  /** Text collected by the current state: a header, a JSON value, or the body of an invoke. */
  #collected = '';
  /** Whether the arguments of the current call have a `{` yet. */
  #argumentsOpen = false;
  /** What ends the value of the current parameter. */
  #inParameter = IN_CONTENT;

  constructor(thinking: boolean, tools: boolean) {
    this.#tools = tools;
    this.#state = thinking ? 'start' : 'content';
  }

  get settledLength(): number {
    return this.#pushedLength - this.#buffer.length;
  }

  push(text: string): ChatDelta[] {
    this.#buffer += text;
    this.#pushedLength += text.length;
    while (this.#step()) {
      // Each step consumes one marker; the last one finds none and leaves what may become one.
    }
    return this.#takeDeltas();
  }

  end(stopped: boolean): ChatDelta[] {
    // Inside a block nothing held back is text. Before one, the tail is text unless a tag has clearly begun.
    const text = this.#tools && TAG_BEGINNING.test(this.#buffer) ? '' : this.#buffer;
    if (this.#state === 'start' || this.#state === 'reasoning') this.#emitText('reasoning', text, this.settledLength);
    else if (this.#state === 'content') this.#emitText('content', text, this.settledLength);
    else if (this.#state === 'invoke' && stopped && !OPEN_TAG.test(this.#buffer) && this.#holdsArguments()) {
      this.#endCall();
    }
    this.#buffer = '';
    this.#state = 'done';
    return this.#takeDeltas();
  }

  /** Consume text up to and including one marker. False when more text is needed. */
  #step(): boolean {
    switch (this.#state) {
      case 'start': {
        // The model sometimes repeats the <think> that ended the prompt.
        const { thinkStart } = CHAT_TOKENS;
        if (this.#buffer.length < thinkStart.length && thinkStart.startsWith(this.#buffer)) return false;
        if (this.#buffer.startsWith(thinkStart)) this.#buffer = this.#buffer.slice(thinkStart.length);
        this.#state = 'reasoning';
        return true;
      }
      case 'reasoning': {
        const at = this.settledLength;
        const { text, marker } = this.#takeUntil(this.#tools ? IN_REASONING_WITH_TOOLS : IN_REASONING);
        this.#emitText('reasoning', text, at);
        if (marker === 'thinkEnd') {
          this.thinkEndAt = at + text.length;
          this.#state = 'content';
        } else if (marker !== null) this.#openBlock(marker);
        return marker !== null;
      }
      case 'content': {
        const at = this.settledLength;
        const { text, marker } = this.#takeUntil(this.#tools ? IN_CONTENT_WITH_TOOLS : IN_CONTENT);
        this.#emitText('content', text, at);
        if (marker !== null) this.#openBlock(marker);
        return marker !== null;
      }
      case 'block': {
        const { marker } = this.#takeUntil(IN_BLOCK);
        if (marker === 'invokeStart') this.#state = 'invokeName';
        else if (marker === 'blockEnd') this.#state = 'done';
        return marker !== null;
      }
      case 'invokeName':
        return this.#stepHeader((header) => this.#beginCall(header));
      case 'invoke': {
        const { text, marker, matched } = this.#takeUntil(IN_INVOKE);
        this.#collected += text;
        if (marker === null) return false;
        if (marker === 'parameterStart') {
          this.#collected = '';
          this.#inParameter = IN_PARAMETER.get(matched)!;
          this.#state = 'parameterHeader';
          return true;
        }
        // A missing closing tag is forgiven when the next invoke or the block's end shows that the call is over.
        this.#endCall();
        this.#state = marker === 'invokeStart' ? 'invokeName' : marker === 'blockEnd' ? 'done' : 'block';
        return true;
      }
      case 'parameterHeader':
        return this.#stepHeader((header) => this.#beginParameter(header));
      case 'string': {
        const { text, marker } = this.#takeUntil(this.#inParameter);
        this.#emitArguments(JSON.stringify(text).slice(1, -1));
        if (marker === null) return false;
        this.#emitArguments('"');
        this.#state = 'invoke';
        return true;
      }
      case 'json': {
        const { text, marker } = this.#takeUntil(this.#inParameter);
        this.#collected += text;
        if (marker === null) return false;
        this.#emitArguments(parsesAsJson(this.#collected) ? this.#collected : JSON.stringify(this.#collected));
        this.#collected = '';
        this.#state = 'invoke';
        return true;
      }
      case 'done':
        this.#buffer = '';
        return false;
      default:
        return this.#state satisfies never;
    }
  }

  /** Enter the tool block. An invoke without the wrapper opens it too. */
  #openBlock(marker: Marker): void {
    if (marker === 'stray') return;
    this.#state = marker === 'invokeStart' ? 'invokeName' : 'block';
  }

  /** Read a header to its end and give it to `begin`; one that a tag interrupts is dropped, and the tag kept. */
  #stepHeader(begin: (header: string) => void): boolean {
    const before = this.#buffer;
    const { text, marker } = this.#takeUntil(IN_HEADER);
    this.#collected += text;
    if (marker === null) return false;
    const header = this.#collected;
    this.#collected = '';
    if (marker === 'headerEnd') {
      begin(header);
    } else {
      this.#buffer = before.slice(text.length);
      this.#state = this.#state === 'invokeName' ? 'block' : 'invoke';
    }
    return true;
  }

  /** `header` is `"NAME`. An unreadable one makes no call; the parameters that follow are skipped with it. */
  #beginCall(header: string): void {
    const name = /^"([^"]+)/.exec(header)?.[1];
    if (name === undefined) {
      this.#state = 'block';
      return;
    }
    this.#deltas.push({ kind: 'tool_name', index: this.#callsBegun++, name });
    this.#argumentsOpen = false;
    this.#state = 'invoke';
  }

  /** `header` is `"NAME" string="true`, `"NAME" string="false`, or `"NAME`, which is taken for a string. */
  #beginParameter(header: string): void {
    const match = /^"(.*)"\s+string="([^"]*)$/s.exec(header) ?? /^"([^"]*)/.exec(header);
    if (match === null) {
      this.#state = 'invoke';
      return;
    }
    const isString = match[2] !== 'false';
    const separator = this.#argumentsOpen ? ', ' : '{';
    this.#argumentsOpen = true;
    this.#emitArguments(`${separator}${JSON.stringify(match[1])}: ${isString ? '"' : ''}`);
    this.#state = isString ? 'string' : 'json';
  }

  /** Whether the invoke that is being read has parameters, or JSON in their place. */
  #holdsArguments(): boolean {
    if (this.#argumentsOpen) return true;
    const body = this.#collected.trim();
    return body.startsWith('{') && parsesAsJson(body);
  }

  /** Close the arguments. Without parameters they are the JSON object in the body, if there is one, else empty. */
  #endCall(): void {
    if (this.#argumentsOpen) this.#emitArguments('}');
    else this.#emitArguments(this.#holdsArguments() ? this.#collected.trim() : '{}');
    this.#collected = '';
    this.toolCallCount++;
  }

  /**
   * Take the text before the first marker, what the marker means and how it is written. Without one, take the text that
   * cannot be the beginning of one, nor half a surrogate pair.
   */
  #takeUntil(wanted: Markers): { text: string; marker: Marker | null; matched: string } {
    const buffer = this.#buffer;
    const match = wanted.pattern.exec(buffer);
    if (match !== null) {
      const [matched] = match;
      this.#buffer = buffer.slice(match.index + matched.length);
      return { text: buffer.slice(0, match.index), marker: wanted.meanings.get(matched)!, matched };
    }
    const end = freeLength(buffer, wanted);
    this.#buffer = buffer.slice(end);
    return { text: buffer.slice(0, end), marker: null, matched: '' };
  }

  #emitText(kind: 'reasoning' | 'content', text: string, at: number): void {
    if (text === '') return;
    const last = this.#deltas.at(-1);
    if (last?.kind === kind && last.at + last.text.length === at) last.text += text;
    else this.#deltas.push({ kind, text, at });
  }

  #emitArguments(text: string): void {
    if (text === '') return;
    const last = this.#deltas.at(-1);
    if (last?.kind === 'tool_arguments') last.text += text;
    else this.#deltas.push({ kind: 'tool_arguments', index: this.#callsBegun - 1, text });
  }

  #takeDeltas(): ChatDelta[] {
    const deltas = this.#deltas;
    this.#deltas = [];
    return deltas;
  }
}

/** Length of the part of `text` that can neither begin a marker nor half a surrogate pair. */
function freeLength(text: string, { texts, firstUnits, maxLength }: Markers): number {
  for (let start = Math.max(0, text.length - maxLength + 1); start < text.length; start++) {
    if (!firstUnits.has(text[start]!)) continue;
    const tail = text.slice(start);
    if (texts.some((marker) => marker.startsWith(tail))) return start;
  }
  return isHighSurrogate(text.charCodeAt(text.length - 1)) ? text.length - 1 : text.length;
}

function isHighSurrogate(code: number): boolean {
  return code >= 0xd800 && code <= 0xdbff;
}

function parsesAsJson(text: string): boolean {
  try {
    JSON.parse(text);
    return true;
  } catch {
    return false;
  }
}
