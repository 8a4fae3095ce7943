/**
 * What an answer is held to, as it travels from the router to the workers: JSON text with the client's own schemas. Who
 * reads it compiles it; readers are the same program, so what the router has accepted compiles everywhere.
 */
import { ApiError } from '../errors.ts';
import { misfit } from './conformance.ts';
import { compile, hopelessParameter, isAnswerable, type AnswerShape, type ToolShape } from './program.ts';
import {
  alternativesOf,
  at,
  chargeSchema,
  checkNesting,
  checkParameter,
  createSchemaReader,
  fullBudget,
  readSchema,
} from './schema.ts';
import type { SchemaBudget, SchemaReader, Shape } from './schema.ts';
import { createGrammar, type Grammar, type Progress } from './matcher.ts';
import { setBit, type Vocabulary } from './vocabulary.ts';

/** A tool whose calls are held to its parameters. */
export interface ConstrainedTool {
  readonly name: string;
  /** Schema of its arguments; absent or null: it has none. */
  readonly parameters?: object | null | undefined;
  /** What its schema says and is not supported is an error; otherwise that parameter may be anything. */
  readonly strict?: boolean | null | undefined;
}

/** What an answer is held to. Paths are those of the request, for errors. */
export interface Constraint {
  /** Whether the answer begins with reasoning, which is free. */
  readonly thinking: boolean;
  /** The schema of the answer's text; null: the answer is a tool call. */
  readonly schema: { readonly value: unknown; readonly path: string } | null;
  /** The tools that may be called instead. */
  readonly tools: readonly { readonly tool: ConstrainedTool; readonly path: string }[];
  readonly maxCalls: number;
}

/** A constraint that was read: what it takes to follow it and to check what came of it. */
export interface ReadConstraint {
  readonly answer: AnswerShape;
  /** Why a finished answer is not what it was held to, in words that follow "the answer"; null if it is. */
  check(answer: { content: string; toolCalls: readonly { name: string; arguments: string }[] }): string | null;
}

/**
 * Check a constraint.
 *
 * @throws ApiError invalid_schema or schema_too_complex, naming the keyword and its path.
 */
export function readConstraint(constraint: Constraint): ReadConstraint {
  const budget = fullBudget();
  const { schema } = constraint;
  if (schema !== null) chargeSchema(schema.value, schema.path, budget);
  for (const { tool, path } of constraint.tools) chargeSchema(tool.parameters, path, budget);
  const value = schema === null ? null : readSchema(schema.value, schema.path, budget);
  const tools = constraint.tools.map(({ tool, path }) => readTool(tool, path, budget));
  if (schema !== null && value !== null) checkNesting(value, schema.path);
  for (const [index, { parameters }] of tools.entries()) checkNesting(parameters, constraint.tools[index]!.path);
  const answer: AnswerShape = { value, tools, maxCalls: constraint.maxCalls };
  if (schema !== null && !isAnswerable({ ...answer, tools: [] })) {
    throw new ApiError('invalid_schema', `${schema.path} allows no value of finite size.`, { param: schema.path });
  }
  for (const [index, tool] of tools.entries()) {
    const name = hopelessParameter(tool);
    if (name === null) continue;
    const param = at(at(constraint.tools[index]!.path, 'properties'), name);
    const message = `${param} is required, and no tool call can have it: it has no value of finite size, or its name or its values hold characters that calls cannot spell.`;
    throw new ApiError('invalid_schema', message, { param });
  }
  return {
    answer,
    check({ content, toolCalls }) {
      if (toolCalls.length === 0) return value === null ? 'calls no tool' : misfitOfText(content, value);
      for (const call of toolCalls) {
        const tool = tools.find(({ name }) => name === call.name);
        if (tool === undefined) return `calls ${JSON.stringify(call.name)}, which it may not`;
        const fault = misfitOfText(call.arguments, tool.parameters);
        if (fault !== null) return fault;
      }
      return null;
    },
  };
}

function misfitOfText(text: string, shape: Shape): string | null {
  let value: unknown;
  try {
    value = JSON.parse(text);
  } catch {
    return 'is not JSON';
  }
  return misfit(value, shape);
}

/** A tool's parameters are an object; what its schema says of them is read one by one. */
function readTool(tool: ConstrainedTool, path: string, budget: SchemaBudget): ToolShape {
  const none: ToolShape['parameters'] = { kind: 'object', properties: [], additional: null, isOpen: true };
  const { name, parameters } = tool;
  if (parameters === undefined || parameters === null) return { name, parameters: none };
  const reader = createSchemaReader(parameters, path, budget);
  const shape = tool.strict === true ? reader.read(parameters, path, 0) : readLeniently(parameters, path, reader);
  const [alternative, ...others] = alternativesOf(shape);
  if (alternative?.kind === 'any' && others.length === 0) return { name, parameters: none };
  if (alternative?.kind === 'object' && others.length === 0) {
    for (const property of alternative.properties)
      checkParameter(property.shape, `${path}.properties.${property.name}`, budget);
    return { name, parameters: alternative };
  }
  throw new ApiError('invalid_schema', `${path} must be the schema of one kind of object.`, { param: path });
}

/** The same for a tool that is not strict: a parameter whose schema is not supported may be anything. */
function readLeniently(parameters: object, path: string, reader: SchemaReader): Shape {
  try {
    return reader.read(parameters, path, 0);
  } catch (error) {
    if (!(error instanceof ApiError) || error.code !== 'invalid_schema') throw error;
  }
  const readPart = (schema: unknown, partPath: string): Shape => {
    try {
      return reader.read(schema, partPath, 1);
    } catch (error) {
      if (!(error instanceof ApiError) || error.code !== 'invalid_schema') throw error;
      return { kind: 'any' };
    }
  };
  const { properties, required, additionalProperties } = parameters as Readonly<Record<string, unknown>>;
  const isObject = typeof properties === 'object' && properties !== null && !Array.isArray(properties);
  const given = Object.entries(isObject ? properties : {});
  const needed = new Set<unknown>(Array.isArray(required) ? required : []);
  const read = given.map(([name, schema]) => {
    return { name, shape: readPart(schema, `${path}.properties.${name}`), required: needed.has(name) };
  });
  // What is required and not among the properties is one of the others.
  for (const [name] of given) needed.delete(name);
  const others = readPart(additionalProperties ?? true, `${path}.additionalProperties`);
  for (const name of needed) if (typeof name === 'string') read.push({ name, shape: others, required: true });
  return { kind: 'object', properties: read, additional: null, isOpen: true };
}

// ---------------------------------------------------------------------------------------------------------
// Answers under way

/** An answer that is held to a constraint, as it grows. */
export interface Guide {
  /** A bit for each token that may come next. Not to be written. */
  mask(): Uint32Array;
  /** Take the next token; false if it may not come here. */
  accept(id: number): boolean;
}

/** Compiles constraints, and keeps those that were used last. */
export interface GuideMaker {
  /** The guide of a new answer to what `text` says. Throws if it is no constraint of ours. */
  start(text: string): Guide;
}

/** Compiled grammars that are kept, by their text. */
const MAX_GRAMMARS = 32;

/** Make guides over `vocabulary`. */
export function createGuideMaker(vocabulary: Vocabulary): GuideMaker {
  const grammars = new Map<string, { thinking: boolean; grammar: Grammar }>();
  return {
    start(text) {
      let entry = grammars.get(text);
      if (entry === undefined) {
        const constraint = JSON.parse(text) as Constraint;
        const grammar = createGrammar(compile(readConstraint(constraint).answer), vocabulary);
        entry = { thinking: constraint.thinking, grammar };
      }
      // Last used, last forgotten.
      grammars.delete(text);
      grammars.set(text, entry);
      const [oldest] = grammars.keys();
      if (grammars.size > MAX_GRAMMARS && oldest !== undefined) grammars.delete(oldest);
      return createGuide(entry.grammar, entry.thinking, vocabulary);
    },
  };
}

function createGuide(grammar: Grammar, thinking: boolean, vocabulary: Vocabulary): Guide {
  let reasons = thinking;
  let progress: Progress = grammar.start();
  let isOver = false;
  return {
    mask() {
      if (!isOver) return reasons ? vocabulary.reasoningMask : progress.mask();
      const mask = new Uint32Array(vocabulary.maskWords);
      setBit(mask, vocabulary.eosId);
      return mask;
    },
    accept(id) {
      if (isOver) return id === vocabulary.eosId;
      if (reasons) {
        if (id === vocabulary.thinkEndId) reasons = false;
        return id !== vocabulary.eosId;
      }
      if (id === vocabulary.eosId) {
        isOver = progress.isEnd;
        return isOver;
      }
      const next = progress.accept(id);
      if (next === null) return false;
      progress = next;
      return true;
    },
  };
}

/**
 * A constraint as it travels.
 *
 * @throws ApiError where it cannot be followed; see readConstraint.
 */
export function packConstraint(constraint: Constraint): { text: string; read: ReadConstraint } {
  // First: what is too large or too deep is never written out.
  const read = readConstraint(constraint);
  return { text: JSON.stringify(constraint), read };
}
