/**
 * Kernel speed: every kernel through its wrapper, at the sizes of a model, beside what the adapter can do at best.
 *
 * Prints one JSON line per case: commit, device, parameters, then for wall time and for processor time of this process
 * the microseconds of one call (median, 10th and 90th percentile over rounds), GB/s, GFLOP/s, and the share of the
 * adapter's own copy and multiply-add rates, which the first lines measure. On a software adapter the processor does the
 * work: its time hardly depends on what else the machine does, wall time does. On a GPU it is only the cost of submitting.
 *
 *   npm run bench:kernels -- [--geometry nano|flash-layer] [--rows 1,64,512] [--context N] [--kernel NAME[,NAME]]
 *                            [--rounds 9] [--adapter NAME]
 */
import { execFileSync } from 'node:child_process';
import { DeviceError, openDevice, type Device } from '../kernels/device.ts';
import { Recorder } from '../kernels/kernel.ts';
import { AdapterError, describeAdapter, setUpAdapter } from '../server/adapter/adapter.ts';
import { rateCases } from './adapter-rates.ts';
import { createMaterial, geometries, kernelCases, type Material, type Work } from './kernel-cases.ts';
import { parseCommandLine, positive, refuse, say } from './command-line.ts';

const HELP = `bench-kernels [--geometry ${Object.keys(geometries).join('|')}] [--rows 1,64,512] [--context N]
              [--kernel NAME[,NAME]] [--rounds N] [--adapter NAME]

  --geometry  sizes of the embedded model, or of one layer of DeepSeek-V4-Flash
  --rows      tokens of a step
  --context   tokens of a sequence when the step is over (nano 1024, flash-layer 4096)
  --kernel    only kernels, or KERNEL/VARIANT, that contain NAME
  --rounds    measurements of each case
  --adapter   lavapipe, swiftshader or a part of an adapter's name
Kernels: ${[...new Set(kernelCases.map(({ kernel }) => kernel))].join(', ')}
`;

// Long enough that clocks and polling (1 ms) do not count.
const ROUND_MS = 60;
// Recording a call takes the host microseconds and holds memory; short calls end their round earlier.
const MAX_CALLS = 4000;

/** Microseconds of one call. */
interface Spread {
  readonly median: number;
  readonly p10: number;
  readonly p90: number;
}

interface Timing {
  readonly calls: number;
  readonly wallUs: Spread;
  readonly cpuUs: Spread;
}

/** Rates of one clock; those of the adapter itself are the best of its cases. */
interface Rates {
  readonly gbPerSecond: number;
  readonly gflopPerSecond: number;
}

function parseOptions() {
  const { values } = parseCommandLine(HELP, {
    options: {
      geometry: { type: 'string', default: 'nano' },
      rows: { type: 'string', default: '1,64,512' },
      context: { type: 'string' },
      kernel: { type: 'string', default: '' },
      rounds: { type: 'string', default: '9' },
      adapter: { type: 'string' },
    },
  });
  const geometry = geometries[values.geometry];
  if (!geometry) refuse(`--geometry: ${values.geometry} is none of ${Object.keys(geometries).join(', ')}`);
  const names = values.kernel.split(',').filter((name) => name !== '');
  const cases = kernelCases.filter(
    ({ kernel, variant }) => names.length === 0 || names.some((name) => `${kernel}/${variant}`.includes(name)),
  );
  if (cases.length === 0) refuse(`--kernel: nothing contains ${values.kernel}`);
  return {
    geometryName: values.geometry,
    geometry,
    cases,
    rowCounts: values.rows.split(',').map((text) => positive('--rows', text)),
    context: values.context === undefined ? geometry.context : positive('--context', values.context),
    rounds: positive('--rounds', values.rounds),
    adapter: values.adapter ?? process.env['HANDOFF_ADAPTER'],
  };
}

/** Time one case: warm up, find out how many calls fill a round, then `rounds` submits of that many calls each. */
async function measure(device: Device, work: Work, rounds: number): Promise<Timing> {
  let turn = 0;
  const round = async (calls: number): Promise<{ wallUs: number; cpuUs: number }> => {
    const recorder = new Recorder(device);
    for (let call = 0; call < calls; call++) work.record(recorder, turn++);
    const cpuBefore = process.cpuUsage();
    const startMs = performance.now();
    recorder.submit();
    await Promise.race([device.queue.onSubmittedWorkDone(), device.lost]);
    const wallUs = (performance.now() - startMs) * 1000;
    const { user, system } = process.cpuUsage(cpuBefore);
    return { wallUs: wallUs / calls, cpuUs: (user + system) / calls };
  };
  // The first dispatch compiles, on lavapipe for seconds. One call alone then says too much, so try twice.
  await round(1);
  let calls = 1;
  for (let attempt = 0; attempt < 2; attempt++) {
    const { wallUs } = await round(calls);
    calls = Math.max(1, Math.min(MAX_CALLS, Math.round((ROUND_MS * 1000) / wallUs)));
  }
  const wallUs: number[] = [];
  const cpuUs: number[] = [];
  for (let index = 0; index < rounds; index++) {
    const time = await round(calls);
    wallUs.push(time.wallUs);
    cpuUs.push(time.cpuUs);
  }
  return { calls, wallUs: spread(wallUs), cpuUs: spread(cpuUs) };
}

function spread(values: readonly number[]): Spread {
  const sorted = [...values].sort((left, right) => left - right);
  const quantile = (share: number): number =>
    fourDigits(sorted[Math.min(sorted.length - 1, Math.floor(share * sorted.length))]!);
  return { median: quantile(0.5), p10: quantile(0.1), p90: quantile(0.9) };
}

/** More would be noise. */
function fourDigits(value: number): number {
  return Number(value.toPrecision(4));
}

function ratesOf(work: Work, medianUs: number): Rates {
  return {
    gbPerSecond: fourDigits(work.bytes / medianUs / 1e3),
    gflopPerSecond: fourDigits(work.flops / medianUs / 1e3),
  };
}

/** One clock's part of a line. `adapter` are the rates to compare with, on the same clock. */
function describe(work: Work, us: Spread, adapter: Rates | null) {
  const rates = ratesOf(work, us.median);
  if (adapter === null) return { us, ...rates };
  return {
    us,
    ...rates,
    shareOfCopy: fourDigits(rates.gbPerSecond / adapter.gbPerSecond),
    shareOfMultiplyAdd: fourDigits(rates.gflopPerSecond / adapter.gflopPerSecond),
  };
}

const options = parseOptions();
const { rounds, context, geometry } = options;

async function main(): Promise<void> {
  const choice = await setUpAdapter({ wanted: options.adapter, say });
  Object.assign(process.env, choice.environment);
  for (const line of describeAdapter(choice)) say(line);
  const device = await openDevice({ adapterName: choice.name });
  try {
    await bench(device);
  } finally {
    device.close();
  }
}

async function bench(device: Device): Promise<void> {
  const commit = execFileSync('git', ['rev-parse', '--short', 'HEAD']).toString().trim();
  const head = { bench: 'kernels', commit, device: device.info.name };

  /** Measure and print one case. A case that does not fit the adapter or the context is said and left out. */
  const run = async (
    labels: { kernel: string; variant: string; geometry?: string; rows?: number },
    prepare: (material: Material) => Work,
    adapter: { wall: Rates; cpu: Rates } | null,
  ): Promise<{ wall: Rates; cpu: Rates } | null> => {
    const name = `${labels.kernel}/${labels.variant}${labels.rows === undefined ? '' : `, rows ${labels.rows}`}`;
    const material = createMaterial(device);
    try {
      const work = prepare(material);
      const { calls, wallUs, cpuUs } = await measure(device, work, rounds);
      const line = {
        ...head,
        ...labels,
        parameters: work.parameters,
        rounds,
        calls,
        bytes: work.bytes,
        flops: work.flops,
        wall: describe(work, wallUs, adapter && adapter.wall),
        cpu: describe(work, cpuUs, adapter && adapter.cpu),
      };
      process.stdout.write(`${JSON.stringify(line)}\n`);
      say(`${name}: ${wallUs.median} us, ${line.wall.gbPerSecond} GB/s, ${line.wall.gflopPerSecond} GFLOP/s`);
      return { wall: ratesOf(work, wallUs.median), cpu: ratesOf(work, cpuUs.median) };
    } catch (error) {
      if (!(error instanceof RangeError)) throw error;
      say(`${name}: left out: ${error.message}`);
      return null;
    } finally {
      material.destroy();
    }
  };

  const best = { wall: { gbPerSecond: 0, gflopPerSecond: 0 }, cpu: { gbPerSecond: 0, gflopPerSecond: 0 } };
  for (const { rate, variant, prepare } of rateCases) {
    const rates = await run({ kernel: rate, variant }, prepare, null);
    if (rates === null) continue;
    for (const clock of ['wall', 'cpu'] as const) {
      const key = rate === 'copy' ? 'gbPerSecond' : 'gflopPerSecond';
      best[clock][key] = Math.max(best[clock][key], rates[clock][key]);
    }
  }
  for (const { kernel, variant, prepare } of options.cases) {
    for (const rows of options.rowCounts) {
      await run(
        { kernel, variant, geometry: options.geometryName, rows },
        (material) => prepare(material, { geometry, rows, context: Math.max(context, rows) }),
        best,
      );
    }
  }
}

// Whoever reads the lines may have seen enough (`| head`).
process.stdout.on('error', (error: NodeJS.ErrnoException) => process.exit(error.code === 'EPIPE' ? 0 : 1));
try {
  await main();
} catch (error) {
  if (!(error instanceof AdapterError || error instanceof DeviceError)) throw error;
  say(`bench-kernels: ${error.message}`);
  process.exitCode = 1;
}
