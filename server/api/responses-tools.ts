/**
 * The tools of a request to /v1/responses. The model knows functions with flat names; the API also has custom tools (one
 * string goes in), namespaces (groups of functions) and tools that only a vendor runs. Pure.
 */
import type { ToolDefinition } from '../../model/chat.ts';
import { ApiError } from '../errors.ts';
import type { ConstrainedTool } from '../grammar/constraint.ts';
import type { ToolChoice } from './constraints.ts';
import { toolName } from './conversation.ts';
import { anyObject, boolean, isObject, list, object, optional, text, wrong } from './fields.ts';
import type { JsonObject } from './fields.ts';

/** The tools of one request, and the way from their names to those that the model sees and back. */
export interface ResponseTools {
  /** What the model is offered. */
  offered: ToolDefinition[];
  /** The parameters of the offered tools, with their places in the request. */
  parameters: { tool: ConstrainedTool; path: string }[];
  choice: ToolChoice;
  /** Types of tools that are not run here and that the model does not see. */
  leftOut: string[];
  /** What the model knows a function as. */
  flatName(name: string, namespace: string | undefined): string;
  /** What the client knows a function as that the model has called. */
  nameOf(flatName: string): { name: string; namespace?: string };
  isCustom(flatName: string): boolean;
}

const maxNamespaceTools = 256;

/** The one parameter of a custom tool. */
const customParameters = {
  type: 'object',
  properties: { input: { type: 'string', description: 'The whole input of the tool.' } },
  required: ['input'],
};

const functionFields = object({
  name: toolName,
  description: optional(text()),
  parameters: optional(anyObject()),
  strict: optional(boolean()),
});

/** Check `tools` and `tool_choice`. Throws `ApiError` naming what is at fault. */
export function readResponseTools(tools: readonly JsonObject[], toolChoice: unknown): ResponseTools {
  const offered: ToolDefinition[] = [];
  const constrained: ResponseTools['parameters'] = [];
  const custom = new Set<string>();
  const leftOut: string[] = [];
  const clientNames = new Map<string, { name: string; namespace?: string }>();
  const flatNames = new Map<string, string>();

  function offer(tool: JsonObject, path: string, namespace: string | null): string {
    const { name, description, parameters, strict } = functionFields.read(tool, path);
    const flat = namespace === null ? name : uniqueName(`${namespace}.${name}`);
    if (clientNames.has(flat)) throw wrong('invalid_value', `${path}.name`, 'unlike all others', name);
    clientNames.set(flat, namespace === null ? { name } : { name, namespace });
    if (namespace !== null) flatNames.set(`${namespace}\n${name}`, flat);
    constrained.push({ tool: { name: flat, parameters, strict }, path: `${path}.parameters` });
    offered.push({
      type: 'function',
      function: {
        name: flat,
        ...(description === undefined ? {} : { description }),
        ...(parameters === undefined ? {} : { parameters }),
      },
    });
    return flat;
  }

  /** `name`, cut to what a tool may be called, with a number behind it where it is taken. */
  function uniqueName(name: string): string {
    const longest = 120;
    const base = name.slice(0, longest);
    let found = base;
    for (let number = 2; clientNames.has(found); number += 1) found = `${base}-${number}`;
    return found;
  }

  for (const [index, tool] of tools.entries()) {
    const path = `tools[${index}]`;
    const kind = tool['type'];
    switch (kind) {
      case 'function':
        offer(tool, path, null);
        break;
      case 'custom':
        custom.add(offer({ ...tool, parameters: customParameters }, path, null));
        break;
      case 'namespace': {
        const group = object({
          name: toolName,
          tools: list(anyObject(), { minItems: 0, maxItems: maxNamespaceTools }),
        }).read(tool, path);
        for (const [childIndex, child] of group.tools.entries()) {
          offer(child, `${path}.tools[${childIndex}]`, group.name);
        }
        break;
      }
      default:
        if (typeof kind !== 'string') throw wrong('invalid_type', `${path}.type`, 'the name of a tool type', kind);
        if (!/^[a-z0-9_]{1,64}$/.test(kind)) {
          throw wrong('invalid_value', `${path}.type`, 'the name of a tool type', kind);
        }
        if (!leftOut.includes(kind)) leftOut.push(kind);
    }
  }
  const flatName: ResponseTools['flatName'] = (name, namespace) =>
    namespace === undefined ? name : (flatNames.get(`${namespace}\n${name}`) ?? `${namespace}.${name}`);
  return {
    offered,
    parameters: constrained,
    choice: readChoice(toolChoice, { offered, flatName }),
    leftOut,
    flatName,
    nameOf: (flat) => clientNames.get(flat) ?? { name: flat },
    isCustom: (flat) => custom.has(flat),
  };
}

function readChoice(value: unknown, { offered, flatName }: Pick<ResponseTools, 'offered' | 'flatName'>): ToolChoice {
  const expected = '"auto", "none", "required" or a function';
  if (value === undefined || value === null) return offered.length > 0 ? 'auto' : 'none';
  if (value === 'auto' || value === 'none') return value;
  if (typeof value === 'string' && value !== 'required') throw wrong('invalid_value', 'tool_choice', expected, value);
  if (typeof value !== 'string' && !isObject(value)) throw wrong('invalid_type', 'tool_choice', expected, value);
  if (isObject(value) && value['type'] !== 'function' && value['type'] !== 'custom') {
    throw new ApiError(
      'unsupported_value',
      'tool_choice.type must be "function" or "custom": no other can be forced.',
      {
        param: 'tool_choice.type',
      },
    );
  }
  if (offered.length === 0) {
    throw wrong('invalid_value', 'tool_choice', '"auto" or "none" in a request without functions', value);
  }
  if (!isObject(value)) return 'required';
  const { name, namespace } = object({ name: text(), namespace: optional(text()) }).read(value, 'tool_choice');
  const flat = flatName(name, namespace);
  if (!offered.some((tool) => tool.function.name === flat)) {
    throw wrong('invalid_value', 'tool_choice.name', 'the name of one of the tools', name);
  }
  return { name: flat };
}

/** The input of a call to a custom tool: the string in its arguments, or the arguments as they stand. */
export function inputOfCustomCall(callArguments: string): string {
  try {
    const value = JSON.parse(callArguments) as unknown;
    if (isObject(value) && typeof value['input'] === 'string') return value['input'];
  } catch {
    // Cut off, or not what was asked for: shown as it is.
  }
  return callArguments;
}
