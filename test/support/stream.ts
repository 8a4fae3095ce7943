/** Streaming completions whose client can vanish at any moment, over plain fetch. */

/** What a test asks for; ids in, greedy unless told otherwise. */
export interface CompletionRequest {
  readonly prompt: readonly number[] | string;
  readonly maxTokens: number;
  readonly ignoreEos?: boolean;
  readonly extra?: Readonly<Record<string, unknown>>;
}

/** An answer under way. */
export interface OpenStream {
  /** Resolves when the first piece of text has arrived. Rejects with the server's error. */
  readonly firstText: Promise<void>;
  /** Resolves with the whole text. Rejects with the server's error or when `cut` was called. */
  readonly text: Promise<string>;
  /** Close the connection at once, as a crashed client would. */
  cut(): void;
}

/** An error the server answered, before or after the headers. */
export class ServerError extends Error {
  override readonly name = 'ServerError';
  readonly status: number;
  readonly code: string | null;
  readonly retryAfter: string | null;
  constructor(status: number, body: { message: string; code?: string | null }, retryAfter: string | null) {
    super(body.message);
    this.status = status;
    this.code = body.code ?? null;
    this.retryAfter = retryAfter;
  }
}

function bodyOf(model: string, request: CompletionRequest, stream: boolean): string {
  return JSON.stringify({
    model,
    prompt: request.prompt,
    max_tokens: request.maxTokens,
    temperature: 0,
    ignore_eos: request.ignoreEos ?? false,
    skip_special_tokens: false,
    stream,
    ...request.extra,
  });
}

/** Open a streaming completion. */
export function openCompletion(url: string, model: string, request: CompletionRequest): OpenStream {
  const abort = new AbortController();
  let resolveFirst = (): void => {};
  let rejectFirst = (_: unknown): void => {};
  const firstText = new Promise<void>((resolve, reject) => {
    resolveFirst = resolve;
    rejectFirst = reject;
  });
  const text = readStream(url, model, request, abort.signal, () => resolveFirst());
  text.catch(rejectFirst);
  firstText.catch(() => {}); // a test that awaits only `text` must not die of the other rejection
  text.catch(() => {});
  return { firstText, text, cut: () => abort.abort() };
}

async function readStream(
  url: string,
  model: string,
  request: CompletionRequest,
  signal: AbortSignal,
  onText: () => void,
): Promise<string> {
  const response = await fetch(`${url}/v1/completions`, {
    method: 'POST',
    headers: { 'content-type': 'application/json' },
    body: bodyOf(model, request, true),
    signal,
  });
  let text = '';
  for await (const chunk of chunksOf<{ choices?: { text?: string }[] }>(response)) {
    const piece = chunk.choices?.[0]?.text ?? '';
    if (piece !== '') {
      text += piece;
      onText();
    }
  }
  onText();
  return text;
}

/**
 * The chunks of a streamed answer of the OpenAI API.
 *
 * Throws `ServerError` for one that is refused or ends with an error, and an Error for one without its end mark.
 */
export async function* chunksOf<T>(response: Response): AsyncGenerator<Awaited<T>> {
  if (!response.ok) throw await errorOf(response);
  const decoder = new TextDecoder();
  let rest = '';
  let done = false;
  for await (const bytes of response.body!) {
    rest += decoder.decode(bytes, { stream: true });
    const events = rest.split('\n\n');
    rest = events.pop()!;
    for (const event of events) {
      const payload = /^\n*data: (.*)$/s.exec(event)?.[1];
      if (payload === undefined) continue;
      if (payload === '[DONE]') {
        done = true;
        continue;
      }
      const chunk = JSON.parse(payload) as Awaited<T> & { error?: { message: string; code?: string } };
      if (chunk.error) throw new ServerError(200, chunk.error, null);
      yield chunk;
    }
  }
  if (!done) throw new Error('the stream ended without [DONE]');
}

async function errorOf(response: Response): Promise<ServerError> {
  const { error } = (await response.json()) as { error: { message: string; code?: string | null } };
  return new ServerError(response.status, error, response.headers.get('retry-after'));
}

/** One completion, not streamed; the whole body. */
export async function complete(
  url: string,
  model: string,
  request: CompletionRequest,
): Promise<{ text: string; finishReason: string; promptTokens: number; completionTokens: number }> {
  const response = await fetch(`${url}/v1/completions`, {
    method: 'POST',
    headers: { 'content-type': 'application/json' },
    body: bodyOf(model, request, false),
  });
  if (!response.ok) throw await errorOf(response);
  const body = (await response.json()) as {
    choices: { text: string; finish_reason: string }[];
    usage: { prompt_tokens: number; completion_tokens: number };
  };
  return {
    text: body.choices[0]!.text,
    finishReason: body.choices[0]!.finish_reason,
    promptTokens: body.usage.prompt_tokens,
    completionTokens: body.usage.completion_tokens,
  };
}
