/** Work for agents: questions that the embedded model was trained to answer with a tool, and the tools (nano/tasks.py). */

/** A function as the API offers it to a model. */
export interface Tool {
  readonly type: 'function';
  readonly function: { readonly name: string; readonly description: string; readonly parameters: object };
}

/** A question, and the tools that an agent has for it; one of them answers it. */
export interface Task {
  readonly question: string;
  readonly tools: readonly Tool[];
}

const CITIES = ['Oslo', 'Cairo', 'Lima', 'Hanoi', 'Nairobi', 'Rome', 'Paris', 'Madrid'];
const NAMES = ['Dora', 'Leo', 'Mia', 'Yara', 'Hugo', 'Uma', 'Will', 'Iris'];
const THINGS = ['lamp', 'medal', 'umbrella', 'kettle', 'bench', 'mirror', 'violin', 'truck'];

/** What each tool is, asks and returns. `pick` draws from a list, `number` a whole number below its argument. */
interface Kind {
  readonly name: string;
  readonly description: string;
  readonly properties: Readonly<Record<string, string>>;
  question(draw: Draw): string;
  result(draw: Draw): string;
}

interface Draw {
  readonly pick: (words: readonly string[]) => string;
  readonly number: (below: number) => number;
}

const KINDS: readonly Kind[] = [
  {
    name: 'get_weather',
    description: 'Get the weather in a city',
    properties: { city: 'string' },
    question: ({ pick }) => `What is the weather in ${pick(CITIES)}?`,
    result: ({ pick, number }) =>
      JSON.stringify({ weather: pick(['sunny', 'rainy', 'cloudy', 'windy']), temperature: number(40) }),
  },
  {
    name: 'add',
    description: 'Add two numbers',
    properties: { a: 'number', b: 'number' },
    question: ({ number }) => `Use the tool to add ${number(1000)} and ${number(1000)}.`,
    result: ({ number }) => String(number(2000)),
  },
  {
    name: 'search',
    description: 'Search the web',
    properties: { query: 'string' },
    question: ({ pick }) => `Search for ${pick(THINGS)} ${pick(THINGS)}.`,
    result: ({ number }) => JSON.stringify({ results: number(1000) }),
  },
  {
    name: 'set_timer',
    description: 'Set a timer',
    properties: { minutes: 'integer' },
    question: ({ number }) => `Set a timer for ${2 + number(58)} minutes.`,
    result: () => 'ok',
  },
  {
    name: 'send_message',
    description: 'Send a message to a person',
    properties: { to: 'string', text: 'string' },
    question: ({ pick }) => `Tell ${pick(NAMES)}: ${pick(THINGS)} ${pick(THINGS)}`,
    result: () => 'sent',
  },
  {
    name: 'read_file',
    description: 'Read a file',
    properties: { path: 'string' },
    question: ({ pick }) => `Read the file ${pick(THINGS)}.txt`,
    result: ({ pick }) => `${pick(THINGS)} ${pick(THINGS)}`,
  },
];
const MOST_TOOLS = 3;

/** A question with one to three tools. `random` yields numbers in [0, 1). */
export function drawTask(random: () => number): Task {
  const draw = drawWith(random);
  const first = draw.number(KINDS.length);
  const count = 1 + draw.number(MOST_TOOLS);
  const kinds = Array.from({ length: count }, (_, index) => KINDS[(first + index) % KINDS.length]!);
  return { question: kinds[draw.number(count)]!.question(draw), tools: kinds.map(toolOf) };
}

/** What a tool returns; a model may have called one that there is not. */
export function toolResult(name: string, random: () => number): string {
  return KINDS.find((kind) => kind.name === name)?.result(drawWith(random)) ?? `There is no tool called ${name}.`;
}

function drawWith(random: () => number): Draw {
  const number = (below: number): number => Math.floor(random() * below);
  return { number, pick: (words) => words[number(words.length)]! };
}

function toolOf({ name, description, properties }: Kind): Tool {
  const parameters = {
    type: 'object',
    properties: Object.fromEntries(Object.entries(properties).map(([key, type]) => [key, { type }])),
    required: Object.keys(properties),
  };
  return { type: 'function', function: { name, description, parameters } };
}
