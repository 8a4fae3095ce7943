/**
 * Checkpoints in safetensors files: headers, shards and byte ranges.
 *
 * A checkpoint comes from strangers, so nothing in it is believed: a header is checked in full before any tensor is
 * read, and shards may only lie beside their index. Opening reads headers only. Layout of a file:
 *
 *     u64 header length | header, JSON in UTF-8 | tensors' bytes, contiguous, in any order of names
 *
 * Follows https://github.com/huggingface/safetensors (format section), with its limits.
 */
import { constants } from 'node:fs';
import { open, readFile, type FileHandle } from 'node:fs/promises';
import { join } from 'node:path';

/** Bits of one element of each storage type that a header may name. */
const DTYPE_BITS = {
  BOOL: 8,
  U8: 8,
  I8: 8,
  F8_E5M2: 8,
  F8_E4M3: 8,
  F8_E8M0: 8,
  U16: 16,
  I16: 16,
  F16: 16,
  BF16: 16,
  U32: 32,
  I32: 32,
  F32: 32,
  U64: 64,
  I64: 64,
  F64: 64,
} as const;

/** Storage type as spelt in a header. */
export type StoredDtype = keyof typeof DTYPE_BITS;

/** One tensor of a checkpoint and where its bytes are. */
export interface StoredTensor {
  readonly name: string;
  readonly dtype: StoredDtype;
  readonly shape: readonly number[];
  /** Half-open range of the tensor's bytes in its file. */
  readonly start: number;
  readonly end: number;
  /** The file's name inside the checkpoint. */
  readonly file: string;
}

/** One file of a checkpoint. */
export interface StoredFile {
  readonly name: string;
  /** What the file has. */
  readonly byteLength: number;
  /** What it has when all tensors of its header are in it. */
  readonly completeBytes: number;
}

/** Where weights come from: a checkpoint on disk, or generated ones in tests. */
export interface TensorSource {
  readonly tensors: ReadonlyMap<string, StoredTensor>;
  /** Files of the checkpoint, and what their headers promise; empty for weights in memory. */
  readonly files: readonly StoredFile[];
  /** Fill `target` with the tensor's bytes from `offset` on. */
  read(tensor: StoredTensor, offset: number, target: Uint8Array): Promise<void>;
  close(): Promise<void>;
}

/** A checkpoint that cannot be used: damaged, hostile, or not a checkpoint. The message names file and tensor. */
export class CheckpointError extends Error {
  override readonly name = 'CheckpointError';
}

const LENGTH_BYTES = 8;
// The format's own limit; a longer header is an attempt to exhaust memory.
const MAX_HEADER_BYTES = 100_000_000;
// An index is a list of names; the largest known one has 3 MB.
const MAX_INDEX_BYTES = 100_000_000;
/** Most bytes asked of the file system at once. */
export const READ_PIECE_BYTES = 16 * 1024 * 1024;

const SINGLE_FILE = 'model.safetensors';
const INDEX_FILE = 'model.safetensors.index.json';

/**
 * Open the checkpoint in `directory`: `model.safetensors.index.json` with its shards, or `model.safetensors`.
 * Reads headers only; the caller closes it.
 *
 * headersOnly  accept files that end before their tensors do; what is missing cannot be read
 *
 * @throws CheckpointError naming file and tensor, on anything that a sound writer would not have written.
 */
export async function openCheckpoint(
  directory: string,
  { headersOnly = false }: { headersOnly?: boolean } = {},
): Promise<TensorSource> {
  const index = await readIndex(directory);
  const files = index ? [...new Set(index.values())].sort() : [SINGLE_FILE];
  const stored: StoredFile[] = [];
  const handles = new Map<string, FileHandle>();
  const close = async (): Promise<void> => {
    await Promise.all([...handles.values()].map((handle) => handle.close()));
    handles.clear();
  };
  const tensors = new Map<string, StoredTensor>();
  try {
    for (const file of files) {
      const handle = await openFile(directory, file);
      handles.set(file, handle);
      const header = await readHeader(handle, file, headersOnly);
      stored.push({ name: file, byteLength: header.fileBytes, completeBytes: header.completeBytes });
      for (const tensor of header.tensors) {
        if (tensors.has(tensor.name))
          throw new CheckpointError(`${file}: tensor ${tensor.name} is also in ${tensors.get(tensor.name)!.file}`);
        tensors.set(tensor.name, tensor);
      }
    }
    if (index) checkIndex(index, tensors);
  } catch (error) {
    await close();
    throw error;
  }
  return {
    tensors,
    files: stored,
    read: (tensor, offset, target) => readRange(handles.get(tensor.file)!, tensor, offset, target),
    close,
  };
}

/** Weights that are already in memory, by stored name, through the same interface. */
export function memorySource(
  entries: Iterable<{ name: string; dtype: StoredDtype; shape: readonly number[]; bytes: Uint8Array }>,
): TensorSource {
  const tensors = new Map<string, StoredTensor>();
  const stored = new Map<string, Uint8Array>();
  for (const { name, dtype, shape, bytes } of entries) {
    const expected = spanBytes(dtype, shape);
    if (expected !== bytes.byteLength)
      throw new CheckpointError(
        `tensor ${name}: ${dtype} [${shape}] needs ${expected} bytes, found ${bytes.byteLength}`,
      );
    tensors.set(name, { name, dtype, shape, start: 0, end: bytes.byteLength, file: '(memory)' });
    stored.set(name, bytes);
  }
  return {
    tensors,
    files: [],
    read(tensor, offset, target) {
      const bytes = stored.get(tensor.name)!;
      if (offset + target.byteLength > bytes.byteLength)
        return Promise.reject(new CheckpointError(`tensor ${tensor.name}: read past its end`));
      target.set(bytes.subarray(offset, offset + target.byteLength));
      return Promise.resolve();
    },
    close: () => Promise.resolve(),
  };
}

/** A file's tensors, and where the last one ends. */
interface Header {
  readonly tensors: readonly StoredTensor[];
  readonly completeBytes: number;
}

// Check one file's header and list its tensors. `fileBytes` is the whole file's length, `header` the JSON text's bytes.
function parseHeader(header: Uint8Array, args: { file: string; fileBytes: number; headersOnly: boolean }): Header {
  const { file, fileBytes, headersOnly } = args;
  const fault = (problem: string): CheckpointError => new CheckpointError(`${file}: ${problem}`);
  if (header[0] !== 0x7b) throw fault('the header does not start with "{"; not a safetensors file');
  let json: unknown;
  try {
    json = JSON.parse(new TextDecoder('utf-8', { fatal: true, ignoreBOM: true }).decode(header));
  } catch (cause) {
    throw fault(`the header is not JSON in UTF-8: ${(cause as Error).message}`);
  }
  const dataStart = LENGTH_BYTES + header.byteLength;
  const tensors: StoredTensor[] = [];
  for (const [name, entry] of Object.entries(json as Record<string, unknown>)) {
    if (name === '__metadata__') checkMetadata(entry, fault);
    else if (!isPlainName(name)) throw fault(ODD_NAME);
    else tensors.push(parseEntry(name, entry, { file, dataStart, fault }));
  }
  const inOrder = tensors.toSorted((left, right) => left.start - right.start || left.end - right.end);
  let end = dataStart;
  for (const tensor of inOrder) {
    if (tensor.start < end) throw fault(`tensor ${tensor.name} overlaps the one before it`);
    if (tensor.start > end) throw fault(`${tensor.start - end} bytes before tensor ${tensor.name} belong to no tensor`);
    end = tensor.end;
  }
  if (end > fileBytes && !headersOnly)
    throw fault(`tensor ${inOrder.at(-1)!.name} ends at byte ${end}, the file has ${fileBytes}: it is cut short`);
  if (end < fileBytes) throw fault(`${fileBytes - end} bytes after the last tensor belong to no tensor`);
  return { tensors, completeBytes: end };
}

// Names are printed when something is wrong: none may steer a terminal, or fill it.
const MAX_NAME_CHARS = 512;
const ODD_NAME = `a tensor's name has control characters, or more than ${MAX_NAME_CHARS} characters`;

function isPlainName(name: string): boolean {
  return name.length <= MAX_NAME_CHARS && !/[\p{Cc}\p{Cf}\p{Zl}\p{Zp}]/u.test(name);
}

function checkMetadata(entry: unknown, fault: (problem: string) => CheckpointError): void {
  const sound =
    typeof entry === 'object' &&
    entry !== null &&
    !Array.isArray(entry) &&
    Object.values(entry).every((value) => typeof value === 'string');
  if (!sound) throw fault('__metadata__ is not a map of strings');
}

function parseEntry(
  name: string,
  entry: unknown,
  context: { file: string; dataStart: number; fault: (problem: string) => CheckpointError },
): StoredTensor {
  const { file, dataStart } = context;
  const fault = (problem: string): CheckpointError => context.fault(`tensor ${name}: ${problem}`);
  if (typeof entry !== 'object' || entry === null) throw fault('its entry is not an object');
  const { dtype, shape, data_offsets: offsets } = entry as Record<string, unknown>;
  if (typeof dtype !== 'string' || !Object.hasOwn(DTYPE_BITS, dtype))
    throw fault(`unknown dtype ${JSON.stringify(dtype)}`);
  if (!isListOfCounts(shape)) throw fault('shape is not a list of whole numbers');
  if (!isListOfCounts(offsets) || offsets.length !== 2) throw fault('data_offsets is not a pair of whole numbers');
  const [start, end] = offsets as [number, number];
  if (end < start) throw fault(`data_offsets [${start}, ${end}] run backwards`);
  const expected = spanBytes(dtype as StoredDtype, shape);
  if (expected === null) throw fault(`shape [${shape}] overflows`);
  if (expected !== end - start)
    throw fault(`${dtype} [${shape}] needs ${expected} bytes, data_offsets span ${end - start}`);
  const tensor = { name, dtype: dtype as StoredDtype, shape, start: dataStart + start, end: dataStart + end, file };
  if (!Number.isSafeInteger(tensor.end)) throw fault('data_offsets overflow');
  return tensor;
}

function isListOfCounts(value: unknown): value is number[] {
  return Array.isArray(value) && value.every((item) => Number.isSafeInteger(item) && (item as number) >= 0);
}

// Bytes of a tensor, or null when the product cannot be counted exactly.
function spanBytes(dtype: StoredDtype, shape: readonly number[]): number | null {
  let bytes = DTYPE_BITS[dtype] / 8;
  for (const size of shape) {
    bytes *= size;
    if (!Number.isSafeInteger(bytes)) return null;
  }
  return bytes;
}

// Opening a pipe would otherwise wait for somebody to write into it.
const READ_FLAGS = constants.O_RDONLY | (constants.O_NONBLOCK ?? 0);

async function openFile(directory: string, file: string): Promise<FileHandle> {
  let handle: FileHandle;
  try {
    handle = await open(join(directory, file), READ_FLAGS);
  } catch (cause) {
    throw new CheckpointError(`${join(directory, file)} cannot be opened: ${(cause as Error).message}`, { cause });
  }
  if ((await handle.stat()).isFile()) return handle;
  await handle.close();
  throw new CheckpointError(`${join(directory, file)} is not a regular file`);
}

async function readHeader(
  handle: FileHandle,
  file: string,
  headersOnly: boolean,
): Promise<Header & { fileBytes: number }> {
  const fileBytes = (await handle.stat()).size;
  if (fileBytes < LENGTH_BYTES)
    throw new CheckpointError(`${file}: ${fileBytes} bytes are too few for a safetensors file`);
  const length = Buffer.alloc(LENGTH_BYTES);
  await readFully(handle, length, 0, file);
  const headerBytes = length.readBigUInt64LE();
  if (headerBytes > BigInt(MAX_HEADER_BYTES))
    throw new CheckpointError(`${file}: a header of ${headerBytes} bytes, at most ${MAX_HEADER_BYTES} are allowed`);
  if (headerBytes > BigInt(fileBytes - LENGTH_BYTES))
    throw new CheckpointError(`${file}: a header of ${headerBytes} bytes in a file of ${fileBytes}`);
  const header = new Uint8Array(Number(headerBytes));
  await readFully(handle, header, LENGTH_BYTES, file);
  return { ...parseHeader(header, { file, fileBytes, headersOnly }), fileBytes };
}

async function readRange(handle: FileHandle, tensor: StoredTensor, offset: number, target: Uint8Array): Promise<void> {
  if (offset < 0 || tensor.start + offset + target.byteLength > tensor.end)
    throw new CheckpointError(`tensor ${tensor.name}: read past its end`);
  await readFully(handle, target, tensor.start + offset, tensor.file);
}

async function readFully(handle: FileHandle, target: Uint8Array, position: number, file: string): Promise<void> {
  let done = 0;
  while (done < target.byteLength) {
    const length = Math.min(target.byteLength - done, READ_PIECE_BYTES);
    const { bytesRead } = await handle.read(target, done, length, position + done);
    if (bytesRead === 0) throw new CheckpointError(`${file}: ended at byte ${position + done} while being read`);
    done += bytesRead;
  }
}

async function readIndex(directory: string): Promise<Map<string, string> | null> {
  let handle: FileHandle;
  try {
    handle = await open(join(directory, INDEX_FILE), READ_FLAGS);
  } catch (cause) {
    if ((cause as NodeJS.ErrnoException).code === 'ENOENT') return null;
    throw new CheckpointError(`${INDEX_FILE}: cannot be opened: ${(cause as Error).message}`, { cause });
  }
  try {
    const stats = await handle.stat();
    if (!stats.isFile()) throw new CheckpointError(`${INDEX_FILE}: is not a regular file`);
    if (stats.size > MAX_INDEX_BYTES)
      throw new CheckpointError(`${INDEX_FILE}: ${stats.size} bytes, at most ${MAX_INDEX_BYTES} are allowed`);
    return parseIndex(await readFile(handle, 'utf8'));
  } finally {
    await handle.close();
  }
}

/** The index's map of tensor name to shard, checked. Shard names must be plain: a path could lead out of the checkpoint. */
export function parseIndex(text: string): Map<string, string> {
  let json: unknown;
  try {
    json = JSON.parse(text);
  } catch (cause) {
    throw new CheckpointError(`${INDEX_FILE}: is not JSON: ${(cause as Error).message}`);
  }
  const map = (json as { weight_map?: unknown } | null)?.weight_map;
  if (typeof map !== 'object' || map === null || Array.isArray(map))
    throw new CheckpointError(`${INDEX_FILE}: weight_map is not an object`);
  const index = new Map<string, string>();
  for (const [name, file] of Object.entries(map)) {
    if (!isPlainName(name)) throw new CheckpointError(`${INDEX_FILE}: ${ODD_NAME}`);
    if (typeof file !== 'string' || !/^[A-Za-z0-9_][A-Za-z0-9_.-]*\.safetensors$/.test(file)) {
      throw new CheckpointError(
        `${INDEX_FILE}: tensor ${name} is said to be in ${JSON.stringify(file)}, which is not a plain file name`,
      );
    }
    index.set(name, file);
  }
  if (index.size === 0) throw new CheckpointError(`${INDEX_FILE}: weight_map is empty`);
  return index;
}

function checkIndex(index: ReadonlyMap<string, string>, tensors: ReadonlyMap<string, StoredTensor>): void {
  for (const [name, file] of index) {
    const found = tensors.get(name)?.file;
    if (found !== file)
      throw new CheckpointError(`${INDEX_FILE}: tensor ${name} is not in ${file}${found ? ` but in ${found}` : ''}`);
  }
  for (const tensor of tensors.values()) {
    if (!index.has(tensor.name))
      throw new CheckpointError(`${tensor.file}: tensor ${tensor.name} is not in ${INDEX_FILE}`);
  }
}
