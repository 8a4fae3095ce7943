/** What the server says of itself: SGLang's server and model info, and the load of its workers. Pure. */
import { ApiError } from '../errors.ts';

/** A configured worker as the router sees it; null loads where it is not linked. */
export interface WorkerSight {
  readonly role: 'prefill' | 'decode';
  /** `prefill-0`. */
  readonly label: string;
  readonly load: {
    readonly rooms: number;
    readonly roomLimit: number;
    readonly running: number;
    readonly queuedTokens: number;
    readonly pagesFree: number;
    readonly pagesTotal: number;
    readonly draining: boolean;
  } | null;
}

/** What info is about. */
export interface InfoSubject {
  readonly version: string;
  readonly modelId: string;
  readonly names: readonly string[];
  readonly contextLength: number;
  readonly fleet: readonly WorkerSight[];
}

/** The body of GET /server_info. Holds neither keys nor paths. */
export function serverInfo({ version, modelId, names, contextLength, fleet }: InfoSubject): object {
  const live = (role: WorkerSight['role']) => fleet.filter((worker) => worker.role === role && worker.load !== null);
  return {
    version,
    model_path: modelId,
    tokenizer_path: modelId,
    served_model_name: modelId,
    served_model_names: names,
    context_length: contextLength,
    disaggregation: { mode: 'pd', prefill: live('prefill').length, decode: live('decode').length },
    internal_states: live('decode').map((worker) => loadOf(worker)),
  };
}

/** The body of GET /model_info. */
export function modelInfo({ modelId }: InfoSubject): object {
  return {
    model_path: modelId,
    tokenizer_path: modelId,
    is_generation: true,
    preferred_sampling_params: null,
    weight_version: 'default',
    model_type: 'deepseek_v4',
    architectures: ['DeepseekV4ForCausalLM'],
    has_image_understanding: false,
    has_audio_understanding: false,
  };
}

const sections = ['core', 'memory', 'disagg', 'queues', 'spec', 'all'] as const;

/**
 * The body of GET /v1/loads. `include`: sections separated by commas, all where it is left out. Throws `ApiError` for a
 * section that is not known.
 */
export function loadsBody({ version, fleet }: InfoSubject, include: string | undefined, timestamp: string): object {
  const wanted = include === undefined || include === '' ? ['all'] : include.split(',').map((name) => name.trim());
  const unknown = wanted.find((name) => !sections.some((section) => section === name));
  if (unknown !== undefined) {
    const shown = JSON.stringify(unknown.slice(0, 64));
    throw new ApiError('invalid_value', `include must be some of ${sections.join(', ')}, found ${shown}.`, {
      param: 'include',
    });
  }
  const has = (section: (typeof sections)[number]) => wanted.includes('all') || wanted.includes(section);
  const loads = fleet.map((worker, index) => {
    const { load } = worker;
    const pagesUsed = load === null ? 0 : load.pagesTotal - load.pagesFree;
    return {
      dp_rank: index,
      worker: worker.label,
      live: load !== null,
      ...(has('core') ? loadOf(worker) : {}),
      ...(has('memory') ? { memory: { pages_used: pagesUsed, pages_total: load?.pagesTotal ?? 0 } } : {}),
      ...(has('disagg') ? { disaggregation: { mode: worker.role } } : {}),
      ...(has('queues') ? { queues: { waiting: waitingOf(worker), queued_tokens: load?.queuedTokens ?? 0 } } : {}),
      ...(has('spec') ? { speculative: null } : {}),
    };
  });
  const sum = (of: (worker: WorkerSight) => number) => fleet.reduce((total, worker) => total + of(worker), 0);
  return {
    timestamp,
    version,
    dp_rank_count: fleet.length,
    loads,
    aggregate: {
      total_running_reqs: sum((worker) => worker.load?.running ?? 0),
      total_waiting_reqs: sum(waitingOf),
      total_reqs: sum((worker) => worker.load?.rooms ?? 0),
    },
  };
}

function waitingOf({ load }: WorkerSight): number {
  return load === null ? 0 : Math.max(0, load.rooms - load.running);
}

function loadOf(worker: WorkerSight): object {
  const { load } = worker;
  return {
    num_running_reqs: load?.running ?? 0,
    num_waiting_reqs: waitingOf(worker),
    num_total_reqs: load?.rooms ?? 0,
    max_total_reqs: load?.roomLimit ?? 0,
    token_usage: load === null || load.pagesTotal === 0 ? 0 : 1 - load.pagesFree / load.pagesTotal,
    draining: load?.draining ?? false,
  };
}
