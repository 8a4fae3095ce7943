/**
 * Text to token ids and back, from a checkpoint's tokenizer.json.
 *
 * The work is done by `@huggingface/tokenizers`; this file fixes the options that would change the text, looks
 * special tokens up by their text (their ids differ between checkpoints) and adds the incremental detokenizer.
 * Only byte-level BPE tokenizers are accepted: the detokenizer needs the bytes of every token.
 */
import { readFileSync } from 'node:fs';
import { join } from 'node:path';
import { Tokenizer as HuggingFaceTokenizer } from '@huggingface/tokenizers';

/** A loaded tokenizer. Immutable; may be shared by any number of requests. */
export interface Tokenizer {
  /** One more than the highest token id. The model's logits may be wider: those ids have no text. */
  readonly vocabSize: number;
  /** Id of the begin-of-sequence token; `encode` does not add it. */
  readonly bosId: number;
  /** Id of the end-of-sequence token. */
  readonly eosId: number;
  /** Token ids of `text`. Texts of added tokens become their ids; nothing is added. Blocks: about 2 µs a character. */
  encode(text: string): number[];
  /**
   * Text of `ids`; bytes that are not UTF-8 become U+FFFD. Ids without a token decode to nothing, as in the Rust
   * library. Special tokens are written out unless `skipSpecialTokens`: the chat parser needs them.
   */
  decode(ids: readonly number[], options?: { skipSpecialTokens?: boolean }): string;
  /** UTF-8 bytes of one token, possibly part of a code point; empty for an id without a token. */
  tokenBytes(id: number): Uint8Array;
  /** Id of the token whose text (in tokenizer.json's spelling) is `text`. */
  tokenId(text: string): number | undefined;
  /** True for tokens marked special in tokenizer.json, like BOS, EOS and the role tags. */
  isSpecial(id: number): boolean;
}

/** Turns a growing list of ids into text. One per output; see createDetokenizer. */
export interface Detokenizer {
  /** Text that token `id` completes: whole code points only, empty while one is incomplete. */
  push(id: number): string;
  /** Text still held back: U+FFFD for an incomplete code point, else empty. The detokenizer is fresh afterwards. */
  flush(): string;
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
  const inner = new HuggingFaceTokenizer(file, config);
  const added = new Map(file.added_tokens.map((token) => [token.id, token]));
  // A loop, not Math.max(...ids): spreading a real vocabulary overflows the call stack.
  let vocabSize = 0;
  for (const id of inner.get_vocab().values()) vocabSize = Math.max(vocabSize, id + 1);

  const requireId = (key: 'bos_token' | 'eos_token'): number => {
    const token = config[key];
    const text = typeof token === 'object' ? token?.content : token;
    const id = text === undefined ? undefined : inner.token_to_id(text);
    if (id === undefined) throw new Error(`${dir}/tokenizer_config.json: ${key} ${text ?? '(absent)'} has no id`);
    return id;
  };

  return {
    vocabSize,
    bosId: requireId('bos_token'),
    eosId: requireId('eos_token'),
    encode: (text) => inner.encode(text, { add_special_tokens: false }).ids,
    decode(ids, { skipSpecialTokens = false } = {}) {
      const known = ids.filter((id) => inner.id_to_token(id) !== undefined);
      if (known.length === 0) return '';
      // The clean-up, on by default, removes spaces before punctuation that the model did write.
      return inner.decode(known, { skip_special_tokens: skipSpecialTokens, clean_up_tokenization_spaces: false });
    },
    tokenBytes(id) {
      const addedToken = added.get(id);
      if (addedToken !== undefined) return utf8.encode(addedToken.content);
      return Uint8Array.from(inner.id_to_token(id) ?? '', byteOfSymbol);
    },
    tokenId: (text) => inner.token_to_id(text),
    isSpecial: (id) => added.get(id)?.special === true,
  };
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
  return {
    push(id) {
      if (options.skipSpecialTokens && tokenizer.isSpecial(id)) return '';
      return decoder.decode(tokenizer.tokenBytes(id), { stream: true });
    },
    flush: () => decoder.decode(),
  };
}

interface TokenizerFile {
  added_tokens: { id: number; content: string; special: boolean }[];
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
