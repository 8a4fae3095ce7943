import assert from 'node:assert/strict';
import test from 'node:test';
import { inspect } from 'node:util';
import fc from 'fast-check';
import { formatJson, jsonFromValue, MAX_JSON_DEPTH, parseJson, parseJsonValue } from '../../../model/json-text.ts';

/** Right: `json.dumps(json.loads(left), ensure_ascii=False)` of Python 3.11. */
const FROM_TEXT: [text: string, python: string][] = [
  ['{"b":1,"a":[1,2,{}],"c":{}}', '{"b": 1, "a": [1, 2, {}], "c": {}}'],
  ['[]', '[]'],
  [' [ true , false , null ] ', '[true, false, null]'],
  ['[1.0,1e5,1E5,1e-7,1e16,123456789012345678]', '[1.0, 100000.0, 100000.0, 1e-07, 1e+16, 123456789012345678]'],
  ['[9007199254740993,-0,-0.0,0.0001,0.00001]', '[9007199254740993, 0, -0.0, 0.0001, 1e-05]'],
  ['[1e15,9999999999999998.0,1.5e300,-2.50]', '[1000000000000000.0, 9999999999999998.0, 1.5e+300, -2.5]'],
  ['[123.456e2,1e400,-1e400,5e-324]', '[12345.6, Infinity, -Infinity, 5e-324]'],
  ['{"10":1,"2":2,"a":3}', '{"10": 1, "2": 2, "a": 3}'],
  ['{"a":1,"b":2,"a":3}', '{"a": 3, "b": 2}'],
  ['{"__proto__":{"x":1}}', '{"__proto__": {"x": 1}}'],
  ['"é\\u00e9\\u2028\\u007f\\/日本"', '"éé\u2028\u007f/日本"'],
  ['"\\n\\t\\u001f\\"\\\\\\b\\f\\r"', '"\\n\\t\\u001f\\"\\\\\\b\\f\\r"'],
  ['"\\ud83d\\ude00"', '"😀"'],
];

test('JSON text is spelled as Python spells it', () => {
  for (const [text, python] of FROM_TEXT) assert.equal(formatJson(parseJson(text)), python, text);
});

test('a parsed value is spelled like Python where its numbers allow', () => {
  const value = { name: 'é', n: [1, 1.5, 1e-7, 1e20, 1e21, -3], none: undefined, ok: true, nil: null };
  assert.equal(
    formatJson(jsonFromValue(value)),
    '{"name": "é", "n": [1, 1.5, 1e-07, 100000000000000000000, 1e+21, -3], "ok": true, "nil": null}',
  );
});

test('members of parseJsonValue are spelled as they were written, also the objects inside them', () => {
  for (const [text, python] of FROM_TEXT) {
    const body = `{"x":[1.0],"v":{"v":${text}},"w":{"v":${text}}}`;
    const value = parseJsonValue(body, ['v', 'none']) as { v: object; w: object };
    assert.deepEqual(value, JSON.parse(body));
    assert.equal(formatJson(jsonFromValue(value.v)), `{"v": ${python}}`, text);
    // Others are plain values.
    assert.equal(formatJson(jsonFromValue(value.w)), formatJson(jsonFromValue({ v: JSON.parse(text) as unknown })));
  }
  const tools = '[{"min":1.0,"big":9007199254740993},{"10":1,"2":1e5},{"n":0.5}]';
  // Of a repeated member the last value counts.
  for (const body of [
    `{"tools":${tools}}`,
    ` { "a" : "\\"tools\\":1" , "tools":[2.0], "b":[{}],"tools" : ${tools} , "c":-1 } `,
  ]) {
    const value = parseJsonValue(body, ['tools']) as { tools: object[] };
    const spelled = value.tools.map((tool) => formatJson(jsonFromValue(tool)));
    assert.deepEqual(spelled, ['{"min": 1.0, "big": 9007199254740993}', '{"10": 1, "2": 100000.0}', '{"n": 0.5}']);
    // Into a new object the parts take their spelling with them.
    assert.match(formatJson(jsonFromValue({ name: 'f', parameters: value.tools[0] })), /"min": 1\.0/);
  }
  for (const plain of ['[1.0]', '5', '{}', '{"tools":1.0}', '{"tools":null}', '"tools"']) {
    assert.deepEqual(parseJsonValue(plain, ['tools']), JSON.parse(plain));
  }
  assert.throws(() => parseJsonValue('{"a":1.0,}', ['a']), SyntaxError);
});

test('the values of one prompt are bounded, whichever way they arrive', () => {
  const many = `[${'1,'.repeat(1000)}1]`;
  const budget = () => ({ valuesLeft: 1000 });
  assert.throws(() => parseJson(many, budget()), /more than \d+ values/);
  assert.throws(() => jsonFromValue(JSON.parse(many), budget()), /more than \d+ values/);
  const shared = { valuesLeft: 2000 };
  parseJson(many, shared);
  assert.throws(() => jsonFromValue(JSON.parse(many), shared), /more than \d+ values/);
});

test('text that is not JSON is refused', () => {
  const broken = ['', '{', '[1,]', '{"a":1,}', '{a:1}', '01', '1.', '+1', '.5', 'NaN', 'tru', '"a', '"\n"', '"\\x"'];
  for (const text of [...broken, '1 2', '[1}', '{"a"}', '"\\', "'a'", '\ufeff1', '\u00a01']) {
    assert.throws(() => parseJson(text), SyntaxError, text);
  }
});

test('nesting is bounded, whichever way the value arrives', () => {
  const nested = (depth: number) => '['.repeat(depth) + ']'.repeat(depth);
  const deepest = nested(MAX_JSON_DEPTH);
  assert.equal(formatJson(parseJson(deepest)), deepest);
  assert.throws(() => parseJson(nested(100_000)), /nested deeper than 256 levels/);
  assert.throws(() => jsonFromValue(JSON.parse(nested(5000))), /nested deeper than 256 levels/);
  assert.throws(() => jsonFromValue(1n), /JSON has no bigint/);
});

test('a string of megabytes is read', () => {
  const text = JSON.stringify('a\n'.repeat(4_000_000));
  assert.equal(formatJson(parseJson(text)), text);
});

test('values survive the reader and the writer, and the reader accepts what JSON.parse accepts', () => {
  fc.assert(
    fc.property(fc.json(), (text) => {
      assert.deepEqual(JSON.parse(formatJson(parseJson(text))), JSON.parse(text));
      const body = `{"a": ${text},"v":[${text}],"b":${text}}`;
      const value = parseJsonValue(body, ['v']) as { v: object };
      assert.deepEqual(value, JSON.parse(body));
      assert.equal(formatJson(jsonFromValue(value.v)), formatJson(parseJson(`[${text}]`)));
    }),
    { seed: 3, numRuns: 500 },
  );
  const soup = fc.array(
    fc.constantFrom('{', '}', '[', ']', ',', ':', '"a"', '"', '1', '-', '.5', 'e3', 'null', ' ', '\\'),
  );
  fc.assert(
    fc.property(soup, (parts) => {
      const text = parts.join('');
      assert.equal(
        accepts(() => parseJson(text)),
        accepts(() => JSON.parse(text)),
        text,
      );
    }),
    { seed: 4, numRuns: 5000 },
  );
});

function accepts(read: () => unknown): boolean {
  try {
    read();
    return true;
  } catch (error) {
    assert.ok(error instanceof SyntaxError, inspect(error));
    return false;
  }
}
