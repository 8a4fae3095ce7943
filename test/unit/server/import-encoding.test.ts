import assert from 'node:assert/strict';
import { mkdirSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import test from 'node:test';
import { inspect } from 'node:util';
import { loadChatEncoding, promptText, renderChat } from '../../../model/chat.ts';
import { ConfigError, resolveConfig } from '../../../server/config.ts';
import {
  DEEPSEEK_V4_DIGESTS,
  digestOf,
  EncodingFileError,
  extractEncoding,
  importEncoding,
  runImportEncoding,
} from '../../../server/import-encoding.ts';
import type { EncodingDigests } from '../../../server/import-encoding.ts';

/** The official texts are the checkpoint's; these are built like them, from what is known of their form. */
const HEAD =
  '## Tools\n\nWrite "<｜DSML｜tool_calls>":\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="$NAME">\n...\n</｜DSML｜invoke>\n' +
  '</｜DSML｜tool_calls>\n\nThink in <think>...</think>; {braces} and a\tb \\ stay.\n\n### Available Tool Schemas\n\n';
const TAIL = '\n\nCall only these.\n';
const EFFORT = 'Reasoning Effort: Absolute.\nLeave "nothing" — unchecked.\n\n';
const LATER_EFFORT = 'Reasoning Effort: Beyond.\n\n';
const FORMAT = '## Response Format:\n\nFollow this:\n{schema}';
const digests: EncodingDigests = {
  toolsHead: digestOf(HEAD),
  toolsTail: digestOf(TAIL),
  effort: digestOf(EFFORT),
  laterEffort: digestOf(LATER_EFFORT),
  responseFormat: digestOf(FORMAT),
};

const CONSTANTS = String.raw`"""
DeepSeek-V4 Encoding, with a 'quote' and a # that is no comment
"""
import json
# don't read this: "dsml_token"
thinking_start_token: str = "<think>"
thinking_end_token = '</think>'
dsml_token: str = "｜DSML｜"

response_format_template: str = (
    "## Response Format:\n\nFollow this:\n{schema}"  # one line
)

TOOLS_TEMPLATE = """## Tools

Write "<{dsml_token}tool_calls>":

<{dsml_token}tool_calls>
<{dsml_token}invoke name="$NAME">
...
</{dsml_token}invoke>
</{dsml_token}tool_calls>

Think in {thinking_start_token}...{thinking_end_token}; {{braces}} and a\tb \
\\ stay.

### Available Tool Schemas

{tool_schemas}

Call only these.
"""
`;
const EFFORT_LITERALS = String.raw`(
    "Reasoning Effort: Absolute.\n"
    # a comment between
    'Leave "nothing" '
    "\u2014 unchecked.\n\n"
)
`;
const CODE = String.raw`
def find(text, index=0):
    p_template = '<{dsml_token}parameter name="{key}" string="{is_str}">{value}</{dsml_token}parameter>'
    return re.findall(r'^\s*name="(.*?)">\n$', text, flags=re.DOTALL), f"'{text!r}'"
`;
const APRIL = `${CONSTANTS}\nREASONING_EFFORT_MAX = ${EFFORT_LITERALS}${CODE}`;
const LATER =
  `${CONSTANTS}${CODE}\nREASONING_EFFORT_PROMPTS = {\n    "low": "",\n    "high": ${EFFORT_LITERALS.trim()},\n` +
  `    "max": ("Reasoning Effort: Beyond.\\n\\n"),\n}\n`;

test('the texts are found in the April file and in later ones, each with its ladder of efforts', () => {
  const common = { tools_head: HEAD, tools_tail: TAIL, response_format: FORMAT };
  assert.deepEqual(extractEncoding(APRIL, digests), { ...common, effort_prefix: { max: EFFORT } });
  assert.deepEqual(extractEncoding(LATER, digests), { ...common, effort_prefix: { high: EFFORT, max: LATER_EFFORT } });
});

test('other ways to write the same file give the same texts', () => {
  const expected = extractEncoding(APRIL, digests);
  assert.deepEqual(extractEncoding(APRIL.replaceAll('\n', '\r\n'), digests), expected);
  assert.deepEqual(extractEncoding(`\ufeff${APRIL}`, digests), expected);
  assert.deepEqual(
    extractEncoding(APRIL.replace('TOOLS_TEMPLATE', 'PROSE').replace('tool_schemas', 'x'), digests),
    expected,
  );
  assert.deepEqual(extractEncoding(APRIL.replace('"""## Tools', 'f"""## Tools'), digests), expected);
  assert.deepEqual(
    extractEncoding(
      APRIL.replace('dsml_token: str = "', "dsml_token = u'").replace('DSML｜"\n\nresp', "DSML｜'\n\nresp"),
      digests,
    ),
    expected,
  );
});

test('a release without a text for the response format has none', () => {
  const file = extractEncoding(APRIL.replace('Follow this', 'Do'), digests);
  assert.equal('response_format' in file, false);
});

test('a file whose texts were changed is refused with each text that is missing', () => {
  const refusal = (source: string) => {
    try {
      extractEncoding(source, digests);
    } catch (error) {
      assert.ok(error instanceof EncodingFileError, inspect(error));
      return error.message;
    }
    return assert.fail('not refused');
  };
  const lost = (message: string) => [...message.matchAll(/no text (before|after|for)/g)].map((match) => match[1]);
  assert.deepEqual(lost(refusal('')), ['before', 'after', 'for']);
  assert.deepEqual(lost(refusal('print("unfinished')), ['before', 'after', 'for']);
  assert.deepEqual(lost(refusal(APRIL.replace('$NAME', '$Name'))), ['before']);
  assert.deepEqual(lost(refusal(APRIL.replace('only these.\n', 'only these. \n'))), ['after']);
  assert.deepEqual(lost(refusal(APRIL.replace('Absolute', 'absolute'))), ['for']);
  // The mark of the tags is part of the text.
  assert.deepEqual(lost(refusal(APRIL.replace('"｜DSML｜"', '"|DSML|"'))), ['before']);
  assert.match(
    refusal(''),
    new RegExp(`${digests.toolsHead.length} characters with SHA-256 ${digests.toolsHead.sha256}`),
  );
  // Without a list of its own, the official texts are wanted.
  assert.throws(() => extractEncoding(APRIL), new RegExp(DEEPSEEK_V4_DIGESTS.toolsHead.sha256));
});

test('the command writes encoding.json for the server to read, and leaves another one alone', () => {
  const model = mkdtempSync(join(tmpdir(), 'handoff-encoding-'));
  try {
    const source = join(model, 'encoding', 'encoding_dsv4.py');
    mkdirSync(join(model, 'encoding'));
    writeFileSync(join(model, 'config.json'), '{}');
    const read = (argv: string[]) => resolveConfig(['import-encoding', ...argv], {});
    assert.throws(
      () => read([]),
      (error) => error instanceof ConfigError && /needed/.test(error.message),
    );
    assert.throws(() => read(['--model', model]), /--source: no file .*encoding_dsv4\.py/);
    writeFileSync(source, LATER);
    const config = read([model]);
    assert.deepEqual(read(['--model', model]), config);
    assert.deepEqual(config, { command: 'import-encoding', model, source });

    assert.match(importEncoding({ model, source }, digests), /^wrote .*encoding\.json: .*effort high, max; one for/);
    assert.match(importEncoding({ model, source }, digests), /is up to date/);
    const prompt = (reasoningEffort: string) =>
      promptText(
        renderChat(loadChatEncoding(model), {
          messages: [{ role: 'user', content: 'U' }],
          tools: [{ function: { name: 'f' } }],
          responseSchema: { type: 'object' },
          thinking: true,
          reasoningEffort,
        }),
      );
    const rest = `\n\n${HEAD}{"name": "f"}${TAIL}\n\n${FORMAT.replace('{schema}', '{"type": "object"}')}<｜User｜>U<｜Assistant｜><think>`;
    assert.equal(prompt('max'), `<｜begin▁of▁sentence｜>${LATER_EFFORT}${rest}`);
    assert.equal(prompt('high'), `<｜begin▁of▁sentence｜>${EFFORT}${rest}`);
    assert.equal(prompt('low'), `<｜begin▁of▁sentence｜>${rest}`);

    writeFileSync(source, APRIL);
    assert.throws(() => importEncoding({ model, source }, digests), /is there already and says something else/);
    assert.equal(loadChatEncoding(model).effortPrefix.get('high'), EFFORT);
    rmSync(join(model, 'encoding.json'));
    importEncoding({ model, source }, digests);
    assert.deepEqual([...loadChatEncoding(model).effortPrefix.keys()], ['max']);
    assert.match(readFileSync(join(model, 'encoding.json'), 'utf8'), /\}\n$/);
  } finally {
    rmSync(model, { recursive: true });
  }
});

test('a file that cannot be used ends the command with 1', (context) => {
  const model = mkdtempSync(join(tmpdir(), 'handoff-encoding-'));
  const written = context.mock.method(process.stderr, 'write', () => true);
  try {
    const run = (source: string) => runImportEncoding({ command: 'import-encoding', model, source });
    writeFileSync(join(model, 'made-up.py'), APRIL);
    assert.equal(run(join(model, 'made-up.py')), 1);
    assert.equal(run(join(model, 'none.py')), 1);
    const lines = written.mock.calls.map((call) => String(call.arguments[0]));
    assert.match(
      lines[0]!,
      /^handoff: .*made-up\.py: no text before the tool schemas: 854 characters with SHA-256 c7c90/,
    );
    assert.match(lines[1]!, /^handoff: ENOENT.*none\.py/);
  } finally {
    written.mock.restore();
    rmSync(model, { recursive: true });
  }
});
