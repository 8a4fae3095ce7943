/**
 * The whole forward pass in plain f64 loops, one token after the other, in one file: what the kernels must agree with.
 *
 * Written from the model description alone (sections 3 to 6), in its decode order (3.11), with unhurried loops and no
 * batching, so that it shares no code and no shape trick with kernels/ and model/. Only its config is shared.
 */
import type { ModelConfig } from '../../model/config.ts';

/** A dequantised tensor, row-major. */
export interface ReferenceTensor {
  readonly shape: readonly number[];
  readonly values: ArrayLike<number>;
}

/** Weights by official name. */
export type ReferenceWeights = ReadonlyMap<string, ReferenceTensor>;

type Vector = Float64Array<ArrayBuffer>;

/** Raw rows and finished entries of one compressor. */
interface Compressor {
  rows: { key: Vector; gate: Vector }[];
  readonly entries: Vector[];
}

interface LayerState {
  readonly window: Vector[];
  readonly main: Compressor;
  readonly index: Compressor;
}

/** A layer's place in the model: `layers.L.` or `mtp.0.`. */
interface Layer {
  readonly prefix: string;
  readonly ratio: number;
  readonly hash: boolean;
  readonly state: LayerState;
}

/** The ratio that pools overlapping blocks and has an indexer. */
const OVERLAP = 4;

/** One sequence through the model, token by token. */
export class ReferenceModel {
  readonly #config: ModelConfig;
  readonly #weights: ReferenceWeights;
  readonly #layers: Layer[];
  readonly #draft: Layer;
  readonly #mainFrequencies: Vector;
  readonly #compressedFrequencies: Vector;
  #position = 0;
  /** Smallest lead of a chosen expert or entry over the best one left out: below ~1e-5 an f32 engine may choose otherwise. */
  readonly smallestLead = { route: Infinity, topK: Infinity };

  constructor(config: ModelConfig, weights: ReferenceWeights) {
    this.#config = config;
    this.#weights = weights;
    this.#layers = config.layers.map(({ ratio, hash }, index) => ({
      prefix: `layers.${index}.`,
      ratio,
      hash,
      state: emptyState(),
    }));
    this.#draft = { prefix: 'mtp.0.', ratio: 0, hash: false, state: emptyState() };
    this.#mainFrequencies = frequencies(config, config.ropeTheta, false);
    this.#compressedFrequencies = frequencies(config, config.compressRopeTheta, true);
  }

  /** Process the token at the next position: its logits, and the streams that the draft block continues from. */
  step(token: number): { logits: Vector; streams: Vector[] } {
    const embedding = this.#row('embed.weight', token);
    let streams = Array.from({ length: this.#config.streams }, () => embedding.slice());
    for (const layer of this.#layers) streams = this.#layer(layer, streams, token, this.#position);
    this.#position += 1;
    return { logits: this.#head('', streams), streams };
  }

  /**
   * Process tokens for what later ones see of them alone: keys, values and entries. Exact in a model of one layer, whose
   * past depends on nothing but the tokens; there it makes contexts of any length affordable.
   */
  skim(tokens: ArrayLike<number>): void {
    if (this.#layers.length !== 1) throw new Error('only a model of one layer can be skimmed');
    const layer = this.#layers[0]!;
    const { prefix } = layer;
    for (let index = 0; index < tokens.length; index++) {
      const embedding = this.#row('embed.weight', tokens[index]!);
      const streams = Array.from({ length: this.#config.streams }, () => embedding);
      this.#spread(streams, `${prefix}hc_attn_`, (mixed) => {
        const x = this.#norm(mixed, `${prefix}attn_norm.weight`);
        this.#remember(layer, x, this.#position);
        return x;
      });
      this.#position += 1;
    }
  }

  /** The draft block at `position`: from that position's streams and the token after it, logits of the one after that. */
  draft(streams: readonly Vector[], nextToken: number, position: number): Vector {
    const embedding = this.#matrix(
      'mtp.0.e_proj',
      this.#norm(this.#row('embed.weight', nextToken), 'mtp.0.enorm.weight'),
    );
    const start = streams.map((stream) =>
      add(embedding, this.#matrix('mtp.0.h_proj', this.#norm(stream, 'mtp.0.hnorm.weight'))),
    );
    return this.#head('mtp.0.', this.#layer(this.#draft, start, nextToken, position));
  }

  #layer(layer: Layer, before: readonly Vector[], token: number, position: number): Vector[] {
    const { prefix } = layer;
    const first = this.#spread(before, `${prefix}hc_attn_`, (mixed) =>
      this.#attention(layer, this.#norm(mixed, `${prefix}attn_norm.weight`), position),
    );
    return this.#spread(first, `${prefix}hc_ffn_`, (mixed) =>
      this.#experts(layer, this.#norm(mixed, `${prefix}ffn_norm.weight`), token),
    );
  }

  // ------------------------------------------------------------------------------------------- hyper-connections, 3.2

  #spread(streams: readonly Vector[], prefix: string, block: (mixed: Vector) => Vector): Vector[] {
    const { streams: n, hcEps, sinkhornIterations } = this.#config;
    const mix = this.#mixes(streams, `${prefix}fn`);
    const scale = this.#vector(`${prefix}scale`);
    const base = this.#vector(`${prefix}base`);
    const pre = streams.map((_, i) => sigmoid(mix[i]! * scale[0]! + base[i]!) + hcEps);
    const post = streams.map((_, i) => 2 * sigmoid(mix[n + i]! * scale[1]! + base[n + i]!));
    const comb = streams.map((_, i) => {
      const logits = streams.map((__, j) => mix[2 * n + n * i + j]! * scale[2]! + base[2 * n + n * i + j]!);
      const largest = Math.max(...logits);
      const powers = logits.map((logit) => Math.exp(logit - largest));
      const sum = powers.reduce((total, power) => total + power, 0);
      return powers.map((power) => power / sum + hcEps);
    });
    for (let iteration = 0; iteration < sinkhornIterations; iteration++) {
      if (iteration > 0) {
        for (const row of comb) {
          const sum = row.reduce((total, value) => total + value, 0) + hcEps;
          for (let j = 0; j < n; j++) row[j]! /= sum;
        }
      }
      for (let j = 0; j < n; j++) {
        const sum = comb.reduce((total, row) => total + row[j]!, 0) + hcEps;
        for (const row of comb) row[j]! /= sum;
      }
    }
    const out = block(weightedSum(streams, pre));
    return streams.map((_, j) => {
      const carried = weightedSum(
        streams,
        comb.map((row) => row[j]!),
      );
      return carried.map((value, d) => value + post[j]! * out[d]!);
    });
  }

  #head(prefix: string, streams: readonly Vector[]): Vector {
    const mix = this.#mixes(streams, `${prefix}hc_head_fn`);
    const scale = this.#vector(`${prefix}hc_head_scale`)[0]!;
    const base = this.#vector(`${prefix}hc_head_base`);
    const pre = streams.map((_, i) => sigmoid(mix[i]! * scale + base[i]!) + this.#config.hcEps);
    return this.#matrix('head', this.#norm(weightedSum(streams, pre), `${prefix}norm.weight`));
  }

  #mixes(streams: readonly Vector[], name: string): Vector {
    const flat = Float64Array.from(streams.flatMap((stream) => [...stream]));
    const root = Math.sqrt(meanSquare(flat) + this.#config.normEps);
    return multiply(this.#tensor(name), flat).map((value) => value / root);
  }

  // --------------------------------------------------------------------------------------------- attention, 3.5 - 3.10

  #attention(layer: Layer, x: Vector, position: number): Vector {
    const { heads, headDim, outputGroups, outputRank, normEps, indexTopK } = this.#config;
    const { ratio, state } = layer;
    const prefix = `${layer.prefix}attn.`;
    const angles = ratio > 0 ? this.#compressedFrequencies : this.#mainFrequencies;
    const queryRank = this.#norm(this.#matrix(`${prefix}wq_a`, x), `${prefix}q_norm.weight`);
    const queries = split(this.#matrix(`${prefix}wq_b`, queryRank), heads).map((query) => {
      const root = Math.sqrt(meanSquare(query) + normEps);
      return this.#rotate(
        query.map((value) => value / root),
        position,
        angles,
        1,
      );
    });
    this.#remember(layer, x, position);
    let chosen = ratio > 0 ? state.main.entries : [];
    if (ratio === OVERLAP && chosen.length > indexTopK) {
      const scores = this.#indexScores(prefix, state.index.entries, queryRank, x, position);
      chosen = this.#largest(scores, indexTopK, 'topK').map((index) => state.main.entries[index]!);
    }

    const keys = [...state.window, ...chosen];
    const sinks = this.#vector(`${prefix}attn_sink`);
    const outputs = queries.map((query, head) => {
      const scores = keys.map((key) => dot(query, key) / Math.sqrt(headDim));
      const largest = Math.max(sinks[head]!, ...scores);
      const powers = scores.map((score) => Math.exp(score - largest));
      const sum = powers.reduce((total, power) => total + power, Math.exp(sinks[head]! - largest));
      const mixed = weightedSum(
        keys,
        powers.map((power) => power / sum),
      );
      return this.#rotate(mixed, position, angles, -1);
    });

    const down = this.#tensor(`${prefix}wo_a.weight`);
    const perGroup = heads / outputGroups;
    const low = new Float64Array(outputGroups * outputRank);
    for (let row = 0; row < low.length; row++) {
      const group = Math.floor(row / outputRank);
      for (let column = 0; column < perGroup * headDim; column++) {
        const head = group * perGroup + Math.floor(column / headDim);
        low[row]! += down.values[row * perGroup * headDim + column]! * outputs[head]![column % headDim]!;
      }
    }
    return this.#matrix(`${prefix}wo_b`, low);
  }

  // Append a token's key-value, and what it completes, to the layer's past.
  #remember(layer: Layer, x: Vector, position: number): void {
    const { ratio, state } = layer;
    const prefix = `${layer.prefix}attn.`;
    const angles = ratio > 0 ? this.#compressedFrequencies : this.#mainFrequencies;
    const keyValue = this.#norm(this.#matrix(`${prefix}wkv`, x), `${prefix}kv_norm.weight`);
    state.window.push(this.#rotate(keyValue, position, angles, 1));
    if (state.window.length > this.#config.windowTokens) state.window.shift();
    if (ratio > 0) this.#compress(state.main, `${prefix}compressor.`, x, position, ratio, false);
    if (ratio === OVERLAP) this.#compress(state.index, `${prefix}indexer.compressor.`, x, position, ratio, true);
  }

  #compress(state: Compressor, prefix: string, x: Vector, position: number, ratio: number, transform: boolean): void {
    const bias = this.#tensor(`${prefix}ape`);
    const width = bias.shape[1]!;
    const within = position % ratio;
    state.rows.push({
      key: this.#matrix(`${prefix}wkv`, x),
      gate: this.#matrix(`${prefix}wgate`, x).map((value, j) => value + bias.values[within * width + j]!),
    });
    if (within !== ratio - 1) return;
    const overlaps = ratio === OVERLAP;
    const dim = overlaps ? width / 2 : width;
    const current = state.rows.slice(-ratio);
    const previous = overlaps ? state.rows.slice(0, -ratio) : [];
    const entry = new Float64Array(dim);
    for (let j = 0; j < dim; j++) {
      const second = width - dim + j;
      const slots = [
        ...previous.map(({ key, gate }) => [key[j]!, gate[j]!] as const),
        ...current.map(({ key, gate }) => [key[second]!, gate[second]!] as const),
      ];
      const largest = Math.max(...slots.map(([, gate]) => gate));
      let sum = 0;
      for (const [key, gate] of slots) {
        entry[j]! += Math.exp(gate - largest) * key;
        sum += Math.exp(gate - largest);
      }
      entry[j]! /= sum;
    }
    const rotated = this.#rotate(
      this.#norm(entry, `${prefix}norm.weight`),
      position + 1 - ratio,
      this.#compressedFrequencies,
      1,
    );
    state.entries.push(transform ? hadamard(rotated) : rotated);
    state.rows = overlaps ? current : [];
  }

  #indexScores(prefix: string, keys: readonly Vector[], queryRank: Vector, x: Vector, position: number): number[] {
    const { indexHeads, indexHeadDim } = this.#config;
    const queries = split(this.#matrix(`${prefix}indexer.wq_b`, queryRank), indexHeads).map((query) =>
      hadamard(this.#rotate(query, position, this.#compressedFrequencies, 1)),
    );
    const weights = this.#matrix(`${prefix}indexer.weights_proj`, x);
    return keys.map(
      (key) =>
        queries.reduce((sum, query, head) => sum + weights[head]! * Math.max(0, dot(query, key)), 0) /
        Math.sqrt(indexHeads * indexHeadDim),
    );
  }

  // Interleaved pairs of the last dimensions. The angle is an f32 product, as in the reference implementations (3.4).
  #rotate(x: Vector, position: number, angles: Vector, sign: 1 | -1): Vector {
    const out = x.slice();
    const start = x.length - this.#config.ropeDim;
    for (const [pair, frequency] of angles.entries()) {
      const angle = Math.fround(Math.fround(position) * frequency);
      const [a, b] = [x[start + 2 * pair]!, x[start + 2 * pair + 1]!];
      out[start + 2 * pair] = a * Math.cos(angle) - sign * b * Math.sin(angle);
      out[start + 2 * pair + 1] = sign * a * Math.sin(angle) + b * Math.cos(angle);
    }
    return out;
  }

  // --------------------------------------------------------------------------------------------------------- experts, 4

  #experts(layer: Layer, x: Vector, token: number): Vector {
    const { expertsPerToken, routeScale } = this.#config;
    const prefix = `${layer.prefix}ffn.`;
    const scores = this.#matrix(`${prefix}gate`, x).map((logit) =>
      Math.sqrt(logit > 20 ? logit : Math.log1p(Math.exp(logit))),
    );
    const chosen = layer.hash
      ? [...this.#row(`${prefix}gate.tid2eid`, token)]
      : this.#largest(add(scores, this.#vector(`${prefix}gate.bias`)), expertsPerToken, 'route');
    const sum = chosen.reduce((total, expert) => total + scores[expert]!, 0);
    let out = new Float64Array(x.length);
    for (const expert of chosen.toSorted((left, right) => left - right)) {
      out = add(out, this.#expert(`${prefix}experts.${expert}.`, x, (scores[expert]! / sum) * routeScale));
    }
    return add(out, this.#expert(`${prefix}shared_experts.`, x, 1));
  }

  #expert(prefix: string, x: Vector, weight: number): Vector {
    const limit = this.#config.swigluLimit;
    const up = this.#matrix(`${prefix}w3`, x);
    const hidden = this.#matrix(`${prefix}w1`, x).map((value, j) => {
      const gate = Math.min(value, limit);
      return gate * sigmoid(gate) * Math.min(Math.max(up[j]!, -limit), limit) * weight;
    });
    return this.#matrix(`${prefix}w2`, hidden);
  }

  // The larger value, then the smaller index; ascending indices out.
  #largest(values: ArrayLike<number>, count: number, kind: 'route' | 'topK'): number[] {
    const order = Array.from(values, (_, index) => index).toSorted(
      (left, right) => values[right]! - values[left]! || left - right,
    );
    if (order.length > count) {
      const lead = values[order[count - 1]!]! - values[order[count]!]!;
      this.smallestLead[kind] = Math.min(this.smallestLead[kind], lead);
    }
    return order.slice(0, count).toSorted((left, right) => left - right);
  }

  // ------------------------------------------------------------------------------------------------------------ weights

  #tensor(name: string): ReferenceTensor {
    const tensor = this.#weights.get(name);
    if (!tensor) throw new Error(`the reference has no tensor ${name}`);
    return tensor;
  }

  #vector(name: string): ArrayLike<number> {
    return this.#tensor(name).values;
  }

  #row(name: string, index: number): Vector {
    const { shape, values } = this.#tensor(name);
    const columns = shape[1]!;
    return Float64Array.from({ length: columns }, (_, column) => values[index * columns + column]!);
  }

  #matrix(name: string, x: Vector): Vector {
    return multiply(this.#tensor(`${name}.weight`), x);
  }

  #norm(x: Vector, name: string): Vector {
    const weight = this.#vector(name);
    const root = Math.sqrt(meanSquare(x) + this.#config.normEps);
    return x.map((value, j) => (value / root) * weight[j]!);
  }
}

function emptyState(): LayerState {
  return { window: [], main: { rows: [], entries: [] }, index: { rows: [], entries: [] } };
}

// f32 steps as in appendix B.
function frequencies(config: ModelConfig, theta: number, scaled: boolean): Vector {
  const { ropeDim: dim, yarn } = config;
  const f = Math.fround;
  return Float64Array.from({ length: dim / 2 }, (_, i) => {
    const base = f(1 / f(theta ** ((2 * i) / dim)));
    if (!yarn || !scaled) return base;
    const correction = (beta: number): number =>
      (dim * Math.log(yarn.originalMaxPositions / (beta * 2 * Math.PI))) / (2 * Math.log(theta));
    const low = Math.max(Math.floor(correction(yarn.betaFast)), 0);
    let high = Math.min(Math.ceil(correction(yarn.betaSlow)), dim - 1);
    if (high === low) high += 0.001;
    const ramp = f(Math.max(0, Math.min(1, (i - low) / (high - low))));
    return f(f(f(base / yarn.factor) * ramp) + f(base * f(1 - ramp)));
  });
}

function multiply(matrix: ReferenceTensor, x: Vector): Vector {
  const [rows, columns] = matrix.shape as [number, number];
  const { values } = matrix;
  const out = new Float64Array(rows);
  for (let row = 0; row < rows; row++) {
    let sum = 0;
    for (let column = 0; column < columns; column++) sum += values[row * columns + column]! * x[column]!;
    out[row] = sum;
  }
  return out;
}

function dot(left: Vector, right: Vector): number {
  let sum = 0;
  for (let index = 0; index < left.length; index++) sum += left[index]! * right[index]!;
  return sum;
}

function add(left: Vector, right: ArrayLike<number>): Float64Array<ArrayBuffer> {
  return Float64Array.from(left, (value, index) => value + right[index]!);
}

function weightedSum(vectors: readonly Vector[], weights: readonly number[]): Vector {
  const out = new Float64Array(vectors[0]!.length);
  for (const [index, vector] of vectors.entries()) {
    const weight = weights[index]!;
    for (let d = 0; d < out.length; d++) out[d]! += weight * vector[d]!;
  }
  return out;
}

function split(x: Vector, parts: number): Vector[] {
  const size = x.length / parts;
  return Array.from({ length: parts }, (_, part) => x.slice(part * size, (part + 1) * size));
}

function meanSquare(x: Vector): number {
  return dot(x, x) / x.length;
}

function sigmoid(x: number): number {
  return 1 / (1 + Math.exp(-x));
}

// Sylvester order, scaled to keep lengths.
function hadamard(x: Vector): Vector {
  return Float64Array.from(x, (_, row) => {
    let sum = 0;
    for (let column = 0; column < x.length; column++) {
      let bits = row & column;
      let odd = 0;
      for (; bits > 0; bits >>= 1) odd ^= bits & 1;
      sum += odd ? -x[column]! : x[column]!;
    }
    return sum / Math.sqrt(x.length);
  });
}
