/**
 * The official way to read a complete answer of the model, end token included, in plain steps: only what the trained
 * format allows, an error for everything else. What the streaming parser (model/chat-parser.ts) is compared with.
 */

/** An answer taken apart. `arguments` is put together as text, so JSON keeps the spelling that the model gave it. */
export interface Completion {
  reasoning: string;
  content: string;
  calls: { name: string; arguments: string }[];
}

const END = '<｜end▁of▁sentence｜>';
const BLOCK = '\n\n<｜DSML｜tool_calls>\n';
const BLOCK_END = '</｜DSML｜tool_calls>';
const PARAMETER_END = '</｜DSML｜parameter>\n';
const INVOKE_END = '</｜DSML｜invoke>\n';

/** Read `text`, the answer to a prompt that ended with `<think>` if `thinking`. Throws for what is not well-formed. */
export function parseCompletion(text: string, thinking: boolean): Completion {
  const answer: Completion = { reasoning: '', content: '', calls: [] };
  let rest = text;
  const takeUntil = (mark: string): string => {
    const index = rest.indexOf(mark);
    if (index === -1) throw new Error(`expected ${JSON.stringify(mark)} in ${JSON.stringify(rest)}`);
    const taken = rest.slice(0, index);
    rest = rest.slice(index + mark.length);
    return taken;
  };
  const take = (mark: string): boolean => {
    if (!rest.startsWith(mark)) return false;
    rest = rest.slice(mark.length);
    return true;
  };

  if (thinking) answer.reasoning = takeUntil('</think>');
  if (!rest.includes(BLOCK)) {
    answer.content = takeUntil(END);
  } else {
    answer.content = takeUntil(BLOCK);
    while (!take(BLOCK_END)) {
      if (!take('<｜DSML｜invoke name="')) throw new Error(`expected an invoke, found ${JSON.stringify(rest)}`);
      const name = takeUntil('">\n');
      const parameters: string[] = [];
      while (take('<｜DSML｜parameter name="')) {
        const key = takeUntil('" string="');
        const isString = takeUntil('">') === 'true';
        const value = takeUntil(PARAMETER_END);
        parameters.push(`${JSON.stringify(key)}: ${isString ? JSON.stringify(value) : value}`);
      }
      if (parameters.length === 0) take('\n');
      if (!take(INVOKE_END)) throw new Error(`expected the invoke to end, found ${JSON.stringify(rest)}`);
      answer.calls.push({ name, arguments: `{${parameters.join(', ')}}` });
    }
    if (!take(END)) throw new Error(`expected the end token, found ${JSON.stringify(rest)}`);
  }
  if (rest !== '') throw new Error(`expected nothing after the end token, found ${JSON.stringify(rest)}`);
  return answer;
}
