/**
 * KV units on their way between the cache and the outside: staged for sending, written on arrival, copied to host memory
 * while a sequence is retracted.
 *
 * Only bytes live here. Which unit may be read, sent or written when is the scheduler's business; a unit that is asked for
 * and is not here is a fault of ours.
 */
import type { UnitPlace } from '../scheduler/types.ts';
import { crc32c } from '../transfer/checksum.ts';
import type { ChunkMessage, RoomKey } from '../transfer/messages.ts';
import type { Engine } from './engine.ts';

/** The bytes of one worker's units outside its cache. */
export interface UnitDepot {
  /** Copy units out of the cache into the staging. Resolves with the checksum of each. Rejects when the device is lost. */
  stage(key: RoomKey, firstUnit: number, places: readonly UnitPlace[]): Promise<number[]>;
  /** The payload of a chunk: the bytes of its units, which leave the staging. */
  take(message: ChunkMessage): Uint8Array;
  /** Staged units that will not be sent. */
  discard(key: RoomKey, firstUnit: number, unitCount: number): void;
  /** Write a unit into the cache. When it returns the queue has its own copy, ordered before every later step. */
  write(place: UnitPlace, bytes: Uint8Array): void;
  /** Copy a sequence's units, pages in order and then the slot, to host memory. */
  save(key: RoomKey, places: readonly UnitPlace[]): Promise<void>;
  /** Write a saved sequence into other places. */
  restore(key: RoomKey, places: readonly UnitPlace[]): void;
  /** Drop a sequence's copy. */
  forget(key: RoomKey): void;
}

/** An empty depot over the engine's cache. */
export function createUnitDepot(engine: Engine): UnitDepot {
  const staged = new Map<string, Uint8Array>();
  const copies = new Map<RoomKey, readonly Uint8Array[]>();
  const nameOf = (key: RoomKey, unit: number): string => `${key}#${unit}`;

  /** Pages come first, then the slot. */
  function read(places: readonly UnitPlace[]): Promise<Uint8Array[]> {
    const pages = places.flatMap((place) => (place.kind === 'page' ? [place.page] : []));
    const slot = places.find((place) => place.kind === 'slot')?.slot ?? null;
    return engine.readUnits(pages, slot);
  }

  function write(place: UnitPlace, bytes: Uint8Array): void {
    if (place.kind === 'page') engine.writePage(place.page, bytes);
    else engine.writeSlot(place.slot, bytes);
  }

  return {
    async stage(key, firstUnit, places) {
      const units = await read(places);
      return units.map((bytes, index) => {
        staged.set(nameOf(key, firstUnit + index), bytes);
        return crc32c(bytes);
      });
    },
    take(message) {
      const units = message.generations.map((_, index) => {
        const unit = nameOf(message.key, message.firstUnit + index);
        const bytes = staged.get(unit);
        if (bytes === undefined) throw new Error(`unit ${unit} was sent without having been read`);
        staged.delete(unit);
        return bytes;
      });
      return units.length === 1 ? units[0]! : Buffer.concat(units);
    },
    discard(key, firstUnit, unitCount) {
      for (let unit = 0; unit < unitCount; unit++) staged.delete(nameOf(key, firstUnit + unit));
    },
    write,
    async save(key, places) {
      copies.set(key, await read(places));
    },
    restore(key, places) {
      const units = copies.get(key);
      if (units?.length !== places.length) throw new Error(`${key} has no copy of ${places.length} units`);
      for (const [index, place] of places.entries()) write(place, units[index]!);
    },
    forget: (key) => void copies.delete(key),
  };
}
