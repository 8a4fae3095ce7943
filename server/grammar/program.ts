/**
 * What an answer may be, as a program over its bytes: automata for what is flat, calls for what nests.
 *
 * The rules of a constraint are written from their ends to their beginnings, so that each instruction knows what follows
 * it. Objects list their properties in the order of the schema, tool calls stand in the markup of the chat format
 * (model/chat.ts). matcher.ts runs the program. Pure.
 */
import { CHAT_TOKENS } from '../../model/chat.ts';
import {
  exceptFor,
  hasRawSpelling,
  integerAutomaton,
  jsonString,
  literalAutomaton,
  literalPattern,
  maybe,
  NUMBER_PATTERN,
  patternAutomaton,
  type Automaton,
  type Pattern,
  type Spelling,
} from './automaton.ts';
import { alternativesOf, freeText, possibleShapes, type Shape } from './schema.ts';

/** Where an instruction is. */
export type Place = number;

/** One step of a program. */
export type Instruction =
  /** Bytes that an automaton accepts; where lengths are counted, `min` to `max` characters of them. */
  | { op: 'text'; automaton: Automaton; isFree: boolean; min: number; max: number; next: Place }
  | { op: 'split'; to: Place[] }
  | { op: 'call'; rule: Place; next: Place }
  /** `min` to `max` times a rule, which always takes bytes. */
  | { op: 'repeat'; rule: Place; min: number; max: number; next: Place }
  | { op: 'return' }
  /** The answer is complete. */
  | { op: 'end' };

type Split = Extract<Instruction, { op: 'split' }>;

/** A program; it begins at `start`. */
export interface Program {
  readonly instructions: readonly Instruction[];
  readonly start: Place;
}

/** A tool whose calls are constrained. Its parameters are a shape of kind object. */
export interface ToolShape {
  readonly name: string;
  readonly parameters: Extract<Shape, { kind: 'object' }>;
}

/** What an answer may be: a value, a block of tool calls, or either. */
export interface AnswerShape {
  readonly value: Shape | null;
  readonly tools: readonly ToolShape[];
  readonly maxCalls: number;
}

/** Where the values of a parameter begin. */
interface ParameterRules {
  readonly raw: Place | null;
  readonly json: Place | null;
}

/** Values that a schema leaves open are nested so deep at most. */
const MAX_FREE_DEPTH = 12;
const NEWLINE_INDENT = 24;

const space: Pattern = literalPattern(' ');
const GAP = patternAutomaton(
  {
    kind: 'choice',
    parts: [
      { kind: 'sequence', parts: [] },
      space,
      {
        kind: 'sequence',
        parts: [literalPattern('\n'), { kind: 'repeat', part: space, min: 0, max: NEWLINE_INDENT }],
      },
    ],
  },
  'raw',
)!;
const COLON = patternAutomaton({ kind: 'sequence', parts: [literalPattern(':'), maybe(space)] }, 'raw')!;
const NUMBER = patternAutomaton(NUMBER_PATTERN, 'raw')!;
const BOOLEAN = literalAutomaton(['true', 'false']);
const RETURN: Place = 0;

/** Whether any answer has this shape. */
export function isAnswerable({ value, tools }: AnswerShape): boolean {
  return (value !== null && possibleShapes(value).has(value)) || tools.some(isCallable);
}

/** Whether there are arguments that a tool can be called with. */
export function isCallable(tool: ToolShape): boolean {
  return hopelessParameter(tool) === null;
}

/** The name of the first parameter that a tool requires and that no call can have; null if there is none. */
export function hopelessParameter({ parameters }: ToolShape): string | null {
  const possible = possibleShapes(parameters);
  const hopeless = parameters.properties.find(({ name, shape, required }) => {
    return required && !isParameter(name, shape, possible);
  });
  return hopeless?.name ?? null;
}

/** Whether a call can have this parameter. */
function isParameter(name: string, shape: Shape, possible: ReadonlySet<Shape>): boolean {
  if (!isParameterName(name)) return false;
  let answer = spellable.get(shape);
  if (answer === undefined) {
    answer = alternativesOf(shape).some((each) => possible.has(each) && hasParameterSpelling(each));
    spellable.set(shape, answer);
  }
  return answer;
}

/** Whether a value of this shape, no union and no reference, can be spelled in a call: strings stand there as they are. */
function hasParameterSpelling(shape: Shape): boolean {
  if (shape.kind === 'string') {
    return shape.pattern === null || shape.pattern.automaton('raw', shape.min, shape.max) !== null;
  }
  if (shape.kind !== 'literals') return true;
  let answer = spellable.get(shape);
  if (answer === undefined) {
    answer = shape.values.some((value) => typeof value !== 'string' || hasRawSpelling(value));
    spellable.set(shape, answer);
  }
  return answer;
}

/** What is known of shapes: many parameters may refer to one that is large. */
const spellable = new WeakMap<Shape, boolean>();

/** Names stand in an attribute of the markup. */
function isParameterName(name: string): boolean {
  return name !== '' && hasRawSpelling(name) && !/["\n<>]/.test(name);
}

/** The program for answers of a shape that some answer has. */
export function compile(answer: AnswerShape): Program {
  const instructions: Instruction[] = [{ op: 'return' }];
  const rules = new Map<Shape, Place>();
  const valueRules = new Map<Shape, ParameterRules>();
  const freeRules = new Map<string, Place>();
  const possible = new Set<Shape>();
  const unwritten: { shape: Shape; entry: Split }[] = [];

  const add = (instruction: Instruction): Place => instructions.push(instruction) - 1;
  const text = (automaton: Automaton, next: Place): Place =>
    add({ op: 'text', automaton, isFree: false, min: 0, max: Infinity, next });
  const known = new Map<string, Automaton>();
  const literal = (value: string, next: Place): Place => {
    let automaton = known.get(value);
    if (automaton === undefined) known.set(value, (automaton = literalAutomaton([value])));
    return text(automaton, next);
  };
  const gap = (next: Place): Place => text(GAP, next);
  const split = (to: Place[]): Place => (to.length === 1 ? to[0]! : add({ op: 'split', to }));
  const call = (rule: Place, next: Place): Place => add({ op: 'call', rule, next });

  /** Characters of a free string. */
  const free = (spelling: Spelling, min: number, max: number, next: Place): Place =>
    add({ op: 'text', automaton: freeText(spelling), isFree: true, min, max, next });

  /** The rule of a value of this shape, as JSON; written later, since shapes may contain themselves. */
  function ruleOf(shape: Shape): Place {
    let rule = rules.get(shape);
    if (rule !== undefined) return rule;
    const entry: Split = { op: 'split', to: [] };
    rule = add(entry);
    rules.set(shape, rule);
    unwritten.push({ shape, entry });
    return rule;
  }

  function writeValue(shape: Shape): Place {
    switch (shape.kind) {
      case 'any':
        return freeRule('value', MAX_FREE_DEPTH);
      case 'never':
        return split([]);
      case 'null':
        return literal('null', RETURN);
      case 'boolean':
        return text(BOOLEAN, RETURN);
      case 'number':
        return text(NUMBER, RETURN);
      case 'integer':
        return text(integerAutomaton(shape.min, shape.max), RETURN);
      case 'string':
        return literal('"', writeText(shape, 'json', literal('"', RETURN)));
      case 'literals':
        return text(literalAutomaton(shape.values.map(literalJson)), RETURN);
      case 'array':
        return writeArray(shape);
      case 'object':
        return writeObject(shape);
      case 'union':
        return split(shape.options.filter((option) => possible.has(option)).map(ruleOf));
      case 'reference':
        return split([ruleOf(shape.target)]);
      default:
        return shape satisfies never;
    }
  }

  /** The characters of a string. */
  function writeText(shape: Extract<Shape, { kind: 'string' }>, spelling: Spelling, next: Place): Place {
    const { pattern, min, max } = shape;
    if (pattern === null) return free(spelling, min, max, next);
    const automaton = pattern.automaton(spelling, min, max);
    return automaton === null ? split([]) : text(automaton, next);
  }

  function writeArray({ prefix, items, min, max }: Extract<Shape, { kind: 'array' }>): Place {
    const close = gap(literal(']', RETURN));
    const comma = (next: Place): Place => literal(',', gap(next));
    const more = items !== null && possible.has(items) ? ruleOf(items) : null;
    const last = Math.min(prefix.length, max);
    // What stands behind so many values, at least one: from the longest list to the shortest.
    let rest = close;
    const count = Math.max(last, 1);
    if (last === prefix.length || prefix.length === 0) {
      const canEnd = more === null || count >= max;
      if (!canEnd) {
        const rule = comma(call(more, RETURN));
        rest = add({ op: 'repeat', rule, min: Math.max(min - count, 0), max: max - count, next: close });
      }
    }
    for (let index = last - 1; index >= 1; index -= 1) {
      const ways = index >= min ? [close] : [];
      if (possible.has(prefix[index]!)) ways.push(comma(call(ruleOf(prefix[index]!), rest)));
      rest = split(ways);
    }
    const ways = min === 0 ? [close] : [];
    const first = prefix[0] ?? items;
    if (max > 0 && first !== null && possible.has(first)) ways.push(gap(call(ruleOf(first), rest)));
    return literal('[', split(ways));
  }

  function writeObject({ properties, additional }: Extract<Shape, { kind: 'object' }>): Place {
    const close = gap(literal('}', RETURN));
    const others = additional !== null && possible.has(additional) ? ruleOf(additional) : null;
    const names = properties.map(({ name }) => jsonString(name).slice(1, -1));
    // The members from one property on, null where there can be none; and what stands behind a member before it.
    let members: Place | null = null;
    let rest = close;
    if (others !== null) {
      const key = (next: Place): Place =>
        literal('"', text(exceptFor(freeText('json'), names), literal('"', text(COLON, next))));
      const rule = literal(',', gap(key(call(others, RETURN))));
      rest = add({ op: 'repeat', rule, min: 0, max: Infinity, next: close });
      members = key(call(others, rest));
    }
    let canEnd = true;
    for (const { name, shape, required } of properties.toReversed()) {
      if (!possible.has(shape)) continue;
      const member = literal(jsonString(name), text(COLON, call(ruleOf(shape), rest)));
      members = required || members === null ? member : split([member, members]);
      canEnd &&= !required;
      const goOn = literal(',', gap(members));
      rest = canEnd ? split([goOn, close]) : goOn;
    }
    if (members === null) return literal('{', close);
    return literal('{', gap(canEnd ? split([members, literal('}', RETURN)]) : members));
  }

  /** Values without a schema. `depth` is how many more may nest. */
  function freeRule(kind: 'value' | 'compound' | 'other', depth: number): Place {
    const key = `${kind}${depth}`;
    let rule = freeRules.get(key);
    if (rule !== undefined) return rule;
    const entry: Split = { op: 'split', to: [] };
    rule = add(entry);
    freeRules.set(key, rule);
    const scalars = [text(NUMBER, RETURN), text(BOOLEAN, RETURN), literal('null', RETURN)];
    if (kind === 'compound') {
      const value = freeRule('value', depth - 1);
      const repeat = (member: Place, close: string): Place => {
        const behind = gap(literal(close, RETURN));
        const more = add({ op: 'repeat', rule: literal(',', gap(member)), min: 0, max: Infinity, next: behind });
        return split([gap(call(member, more)), behind]);
      };
      const member = literal('"', free('json', 0, Infinity, literal('"', text(COLON, call(value, RETURN)))));
      entry.to.push(literal('{', repeat(member, '}')), literal('[', repeat(call(value, RETURN), ']')));
    } else {
      entry.to.push(...scalars);
      if (depth > 0) entry.to.push(freeRule('compound', depth));
      if (kind === 'value') entry.to.push(literal('"', free('json', 0, Infinity, literal('"', RETURN))));
    }
    return rule;
  }

  // ---- tool calls

  const { dsml } = CHAT_TOKENS;
  const parameterEnd = `</${dsml}parameter>\n`;

  function writeInvoke({ name, parameters }: ToolShape): Place {
    const end = `</${dsml}invoke>\n`;
    let [first, rest] = [literal(`\n${end}`, RETURN), literal(end, RETURN)];
    for (const property of parameters.properties.toReversed()) {
      if (!isParameter(property.name, property.shape, possible)) continue;
      const parameter = writeParameter(property.name, property.shape, rest);
      first = property.required ? parameter : split([parameter, first]);
      rest = property.required ? parameter : split([parameter, rest]);
    }
    return literal(`<${dsml}invoke name="${name}">\n`, first);
  }

  function writeParameter(name: string, shape: Shape, next: Place): Place {
    const end = literal(parameterEnd, next);
    const { raw, json } = parameterRules(shape);
    const ways: Place[] = [];
    if (raw !== null) ways.push(literal('true">', call(raw, end)));
    if (json !== null) ways.push(literal('false">', call(json, end)));
    return literal(`<${dsml}parameter name="${name}" string="`, split(ways));
  }

  /**
   * The rules of a parameter's value: strings stand as they are, everything else as JSON; null where there is none. Many
   * parameters may refer to one definition, which is written once.
   */
  function parameterRules(shape: Shape): ParameterRules {
    const known = valueRules.get(shape);
    if (known !== undefined) return known;
    const raw: Place[] = [];
    const json: Place[] = [];
    for (const each of alternativesOf(shape)) {
      if (!possible.has(each) || !hasParameterSpelling(each)) continue;
      if (each !== shape) {
        const rules = parameterRules(each);
        if (rules.raw !== null) raw.push(rules.raw);
        if (rules.json !== null) json.push(rules.json);
      } else if (each.kind === 'string') raw.push(writeText(each, 'raw', RETURN));
      else if (each.kind === 'any') {
        raw.push(free('raw', 0, Infinity, RETURN));
        json.push(freeRule('other', MAX_FREE_DEPTH));
      } else if (each.kind === 'literals') {
        const isText = (value: unknown): value is string => typeof value === 'string';
        const texts = each.values.filter(isText).filter(hasRawSpelling);
        const others = each.values.filter((value) => !isText(value));
        if (texts.length > 0) raw.push(text(literalAutomaton(texts), RETURN));
        if (others.length > 0) json.push(text(literalAutomaton(others.map(literalJson)), RETURN));
      } else json.push(ruleOf(each));
    }
    const rules = { raw: raw.length > 0 ? split(raw) : null, json: json.length > 0 ? split(json) : null };
    valueRules.set(shape, rules);
    return rules;
  }

  const end = add({ op: 'end' });
  const ways: Place[] = [];
  if (answer.value !== null) {
    for (const shape of possibleShapes(answer.value)) possible.add(shape);
    if (possible.has(answer.value)) ways.push(call(ruleOf(answer.value), end));
  }
  const tools = answer.tools.filter(isCallable);
  if (tools.length > 0) {
    for (const { parameters } of tools) for (const shape of possibleShapes(parameters)) possible.add(shape);
    const invoke = split(tools.map(writeInvoke));
    const close = literal(`</${dsml}tool_calls>`, end);
    const calls = add({ op: 'repeat', rule: invoke, min: 1, max: answer.maxCalls, next: close });
    ways.push(literal(`\n\n<${dsml}tool_calls>\n`, calls));
  }
  for (const { shape, entry } of unwritten) entry.to.push(writeValue(shape));
  return { instructions, start: split(ways) };
}

/** A value as JSON, in the spelling of the automata. */
function literalJson(value: unknown): string {
  return JSON.stringify(value).replaceAll('\uff5c', String.raw`\uff5c`);
}
