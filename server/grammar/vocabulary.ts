/**
 * A tokenizer's tokens by their bytes, so that all that may come next are found in one walk. Pure.
 *
 * Tokens of whole characters that may stand in any string, most of a large vocabulary, are kept apart: within a string
 * they are all allowed, and need not be walked through.
 */
import { CHAT_TOKENS } from '../../model/chat.ts';
import type { Tokenizer } from '../../model/tokenizer.ts';

/** A tree of tokens: the children of a node, and the tokens whose bytes end in it. */
export interface TokenTree {
  /** First child and next sibling by node; 0 is none, and the root. */
  readonly child: Int32Array;
  readonly sibling: Int32Array;
  readonly byte: Uint8Array;
  /** The token of a node, or -1. Tokens of equal bytes: the first one. */
  readonly token: Int32Array;
}

/** What a matcher needs to know of a tokenizer. */
export interface Vocabulary {
  /** u32 words of a mask: a bit for each id, whether or not it has a token. */
  readonly maskWords: number;
  readonly eosId: number;
  readonly thinkEndId: number;
  /** Tokens that may stand in any string as they are, and all others. */
  readonly plain: TokenTree;
  readonly others: TokenTree;
  /** `plainMasks[n]`: the plain tokens of up to n characters. */
  readonly plainMasks: readonly Uint32Array[];
  /** What may be sampled while an answer reasons. */
  readonly reasoningMask: Uint32Array;
  /** Null for a token that no constrained text holds. */
  bytesOf(id: number): Uint8Array | null;
}

/** Longer tokens are not kept apart. */
const MAX_PLAIN_LENGTH = 32;

/** The vocabulary of `tokenizer` for a model with `vocabSize` logits. Throws if it lacks the mark that ends reasoning. */
export function createVocabulary(tokenizer: Tokenizer, vocabSize: number): Vocabulary {
  const maskWords = Math.ceil(vocabSize / 32);
  const { eosId } = tokenizer;
  const thinkEndId = tokenizer.tokenId(CHAT_TOKENS.thinkEnd);
  if (thinkEndId === undefined) throw new Error(`the tokenizer has no token ${CHAT_TOKENS.thinkEnd}`);
  // Of the special tokens only the mark of tool calls is text that a constraint can ask for.
  const dsmlId = tokenizer.tokenId(CHAT_TOKENS.dsml);
  const marks = [CHAT_TOKENS.thinkStart, CHAT_TOKENS.thinkEnd].map((text) => tokenizer.tokenId(text));
  const plainMasks = Array.from({ length: MAX_PLAIN_LENGTH + 1 }, () => new Uint32Array(maskWords));
  const reasoningMask = new Uint32Array(maskWords);
  const plain: Entry[] = [];
  const others: Entry[] = [];
  const bytes: (Uint8Array | null)[] = [];
  for (let id = 0; id < Math.min(tokenizer.vocabSize, vocabSize); id += 1) {
    const isText = id === dsmlId || !(tokenizer.isSpecial(id) || marks.includes(id));
    const text = tokenizer.tokenBytes(id);
    bytes.push(isText && text.length > 0 ? text : null);
    if (id === thinkEndId || (isText && id !== dsmlId && text.length > 0)) setBit(reasoningMask, id);
    if (!isText || text.length === 0) continue;
    const length = plainLength(text);
    (length === null ? others : plain).push({ id, bytes: text });
    for (let most = length ?? Infinity; most <= MAX_PLAIN_LENGTH; most += 1) setBit(plainMasks[most]!, id);
  }
  return {
    maskWords,
    eosId,
    thinkEndId,
    plain: treeOf(plain),
    others: treeOf(others),
    plainMasks,
    reasoningMask,
    bytesOf: (id) => bytes[id] ?? null,
  };
}

/** Allow token `id` in a mask. */
export function setBit(mask: Uint32Array, id: number): void {
  mask[id >>> 5]! |= 1 << (id & 31);
}

/** Whether a mask allows token `id`. */
export function hasBit(mask: Uint32Array, id: number): boolean {
  return ((mask[id >>> 5]! >>> (id & 31)) & 1) === 1;
}

interface Entry {
  readonly id: number;
  readonly bytes: Uint8Array;
}

const strict = new TextDecoder('utf-8', { fatal: true, ignoreBOM: true });

/** Characters of a token that may stand in any string as it is; null for others. */
function plainLength(bytes: Uint8Array): number | null {
  let text: string;
  try {
    text = strict.decode(bytes);
  } catch {
    return null;
  }
  // oxlint-disable-next-line no-control-regex -- these are what JSON escapes
  if (/[\u0000-\u001f"\\<\uff5c]/.test(text)) return null;
  const { length } = Array.from(text);
  return length > MAX_PLAIN_LENGTH ? null : length;
}

function treeOf(entries: readonly Entry[]): TokenTree {
  const most = entries.reduce((sum, entry) => sum + entry.bytes.length, 1);
  const child = new Int32Array(most);
  const sibling = new Int32Array(most);
  const byte = new Uint8Array(most);
  const token = new Int32Array(most).fill(-1);
  const edges = new Map<number, number>();
  let count = 1;
  for (const { id, bytes } of entries) {
    let node = 0;
    for (const value of bytes) {
      const edge = node * 256 + value;
      let next = edges.get(edge);
      if (next === undefined) {
        next = count++;
        edges.set(edge, next);
        byte[next] = value;
        sibling[next] = child[node]!;
        child[node] = next;
      }
      node = next;
    }
    if (token[node] === -1) token[node] = id;
  }
  return {
    child: child.slice(0, count),
    sibling: sibling.slice(0, count),
    byte: byte.slice(0, count),
    token: token.slice(0, count),
  };
}
