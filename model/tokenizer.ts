/**
 * Text to token ids and back, from a checkpoint's tokenizer.json.
 *
 * The work is done by `@huggingface/tokenizers`; this file decides which text may become special tokens, looks them
 * up by their text (their ids differ between checkpoints) and adds the incremental detokenizer. Only byte-level BPE
 * tokenizers are accepted: decoding needs the bytes of every token.
 */
import { readFileSync } from 'node:fs';
import { join } from 'node:path';
import { Tokenizer as HuggingFaceTokenizer } from '@huggingface/tokenizers';

/**
 * A stretch of a prompt. In a trusted one, written by this server or by the checkpoint's authors, the texts of special
 * tokens become these tokens; in one that came from outside they stay plain text, whatever they say.
 */
export interface PromptPiece {
  readonly text: string;
  readonly trusted: boolean;
}

/** A loaded tokenizer. Immutable; may be shared by any number of requests. */
export interface Tokenizer {
  /** One more than the highest token id. The model's logits may be wider: those ids have no text. */
  readonly vocabSize: number;
  /** Id of the begin-of-sequence token; `encode` does not add it. */
  readonly bosId: number;
  /** Id of the end-of-sequence token. */
  readonly eosId: number;
  /**
   * Token ids of `prompt`; a string is one trusted piece. Only added tokens split the text: pieces are joined before the
   * rest is cut into words, so their borders leave no trace. Nothing is added. Blocks: about 2 µs a character.
   */
  encode(prompt: string | readonly PromptPiece[]): number[];
  /**
   * Text of `ids`; bytes that are not UTF-8 become U+FFFD. Ids without a token decode to nothing, as in the Rust
   * library. Special tokens are written out unless `skipSpecialTokens`: the chat parser needs them.
   */
  decode(ids: readonly number[], options?: { skipSpecialTokens?: boolean }): string;
  /** UTF-8 bytes of one token, possibly part of a code point; empty for an id without a token. */
  tokenBytes(id: number): Uint8Array;
  /** Id of the token whose text (in tokenizer.json's spelling) is `text`. */
  tokenId(text: string): number | undefined;
  /** True for tokens like BOS, EOS and the role tags: marked special in tokenizer.json, or written `<｜…｜>`. */
  isSpecial(id: number): boolean;
}

/** Turns a growing list of ids into text. One per output; see createDetokenizer. */
export interface Detokenizer {
  /** Text that token `id` completes: whole code points only, empty while one is incomplete. */
  push(id: number): string;
  /** Text still held back: U+FFFD for an incomplete code point, else empty. The detokenizer is fresh afterwards. */
  flush(): string;
  /** Whether the bytes of an incomplete code point are held back. */
  readonly holdsBytes: boolean;
}

/**
 * Read tokenizer.json and tokenizer_config.json of the checkpoint directory `dir`.
 *
 * Throws if a file is missing, the decoder is not byte-level, or the BOS or EOS token has no id.
 */
export function loadTokenizer(dir: string): Tokenizer {
  const file = readJson(join(dir, 'tokenizer.json')) as TokenizerFile;
  const config = readJson(join(dir, 'tokenizer_config.json')) as TokenizerConfig;
  if (file.decoder?.type !== 'ByteLevel') {
    throw new Error(`${dir}/tokenizer.json: expected a ByteLevel decoder, found ${file.decoder?.type ?? 'none'}`);
  }
  // Without its added tokens the library never reads one out of a text: that is decided here, piece by piece.
  const inner = new HuggingFaceTokenizer({ ...file, added_tokens: [] }, config);
  const added = new Map(file.added_tokens.map((token) => [token.id, token]));
  const addedIds = new Map(file.added_tokens.map((token) => [token.content, token.id]));
  const odd = file.added_tokens.find((token) => token.lstrip || token.rstrip || token.single_word);
  if (odd !== undefined) {
    throw new Error(
      `${dir}/tokenizer.json: added token ${odd.content} has lstrip, rstrip or single_word, expected none`,
    );
  }
  // A loop, not Math.max(...ids): spreading a real vocabulary overflows the call stack.
  let vocabSize = 0;
  for (const ids of [inner.get_vocab().values(), added.keys()]) {
    for (const id of ids) vocabSize = Math.max(vocabSize, id + 1);
  }

  const idOf = (text: string): number | undefined => addedIds.get(text) ?? inner.token_to_id(text);
  const requireId = (key: 'bos_token' | 'eos_token'): number => {
    const token = config[key];
    const text = typeof token === 'object' ? token?.content : token;
    const id = text === undefined ? undefined : idOf(text);
    if (id === undefined) throw new Error(`${dir}/tokenizer_config.json: ${key} ${text ?? '(absent)'} has no id`);
    return id;
  };

  const splitter = addedTokenPattern([...addedIds.keys()]);
  const tokenizer: Tokenizer = {
    vocabSize,
    bosId: requireId('bos_token'),
    eosId: requireId('eos_token'),
    encode(prompt) {
      const ids: number[] = [];
      let text = '';
      const endText = () => {
        // A loop, not push(...more): spreading a long text's ids overflows the call stack.
        if (text !== '') for (const id of inner.encode(text, { add_special_tokens: false }).ids) ids.push(id);
        text = '';
      };
      for (const piece of typeof prompt === 'string' ? [{ text: prompt, trusted: true }] : prompt) {
        let end = 0;
        for (const match of piece.trusted ? piece.text.matchAll(splitter) : []) {
          text += piece.text.slice(end, match.index);
          endText();
          ids.push(addedIds.get(match[0])!);
          end = match.index + match[0].length;
        }
        text += piece.text.slice(end);
      }
      endText();
      return ids;
    },
    decode(ids, { skipSpecialTokens = false } = {}) {
      const detokenizer = createDetokenizer(tokenizer, { skipSpecialTokens });
      return ids.map((id) => detokenizer.push(id)).join('') + detokenizer.flush();
    },
    tokenBytes(id) {
      const addedToken = added.get(id);
      if (addedToken !== undefined) return utf8.encode(addedToken.content);
      return Uint8Array.from(inner.id_to_token(id) ?? '', byteOfSymbol);
    },
    tokenId: idOf,
    isSpecial(id) {
      const addedToken = added.get(id);
      // Not every release marks its role tags.
      return addedToken !== undefined && (addedToken.special || /^<｜.*｜>$/.test(addedToken.content));
    },
  };
  return tokenizer;
}

/**
 * Make an incremental detokenizer over `tokenizer`.
 *
 * The texts of all pushes and the final flush, joined, equal `tokenizer.decode` of all ids with the same option.
 * Each push costs the bytes of its own token, however long the output already is.
 */
export function createDetokenizer(tokenizer: Tokenizer, options: { skipSpecialTokens: boolean }): Detokenizer {
  // ignoreBOM keeps a leading U+FEFF, which is text here. In streaming mode the decoder holds an incomplete code point.
  const decoder = new TextDecoder('utf-8', { ignoreBOM: true });
  /** The last bytes, none behind ASCII: no code point that is incomplete has more than three. */
  let tail: number[] = [];
  return {
    push(id) {
      if (options.skipSpecialTokens && tokenizer.isSpecial(id)) return '';
      const bytes = tokenizer.tokenBytes(id);
      const last = bytes.at(-1);
      if (last !== undefined) tail = last < 0x80 ? [] : [...tail, ...bytes.slice(-3)].slice(-3);
      return decoder.decode(bytes, { stream: true });
    },
    flush() {
      tail = [];
      return decoder.decode();
    },
    get holdsBytes() {
      if (tail.length === 0) return false;
      // A decoder shows that it holds something back only by what it makes of the end.
      const probe = new TextDecoder('utf-8', { ignoreBOM: true });
      probe.decode(Uint8Array.from(tail), { stream: true });
      return probe.decode() !== '';
    },
  };
}

/** Finds added tokens in text, at each place the longest. */
function addedTokenPattern(contents: readonly string[]): RegExp {
  if (contents.length === 0) return /(?!)/g;
  const escaped = contents
    .toSorted((a, b) => b.length - a.length)
    .map((content) => content.replaceAll(/[\\^$.*+?()[\]{}|]/g, '\\$&'));
  return new RegExp(escaped.join('|'), 'g');
}

interface TokenizerFile {
  added_tokens: {
    id: number;
    content: string;
    special: boolean;
    lstrip?: boolean;
    rstrip?: boolean;
    single_word?: boolean;
  }[];
  decoder: { type: string } | null;
}

interface TokenizerConfig {
  bos_token?: string | { content: string } | null;
  eos_token?: string | { content: string } | null;
}

const utf8 = new TextEncoder();

function readJson(path: string): unknown {
  return JSON.parse(readFileSync(path, 'utf8'));
}

/**
 * Byte-level BPE writes each byte as one printable symbol: printable Latin-1 stands for itself, the other 68 bytes
 * are numbered from U+0100 upwards (`bytes_to_unicode` of GPT-2).
 */
const BYTE_OF_SYMBOL: ReadonlyMap<string, number> = (() => {
  const bytes = new Map<string, number>();
  let unprintableCount = 0;
  for (let byte = 0; byte < 256; byte++) {
    const printable = (byte >= 0x21 && byte <= 0x7e) || (byte >= 0xa1 && byte <= 0xac) || byte >= 0xae;
    bytes.set(String.fromCharCode(printable ? byte : 0x100 + unprintableCount++), byte);
  }
  return bytes;
})();

function byteOfSymbol(symbol: string): number {
  const byte = BYTE_OF_SYMBOL.get(symbol);
  if (byte === undefined) throw new Error(`token symbol ${JSON.stringify(symbol)} stands for no byte`);
  return byte;
}
