/** Rooms whose answers are drawn from what their constraints allow: a model that knows nothing and obeys. */
import { createGuideMaker } from '../../server/grammar/constraint.ts';
import { createVocabulary, hasBit } from '../../server/grammar/vocabulary.ts';
import type { Rooms } from '../../server/rooms.ts';
import { tokenizer } from './ask.ts';

const vocabulary = createVocabulary(tokenizer, tokenizer.vocabSize);
const maker = createGuideMaker(vocabulary);

/** Rooms for requests with a constraint; each answer ends as soon as it may. Reasoning is over after some tokens. */
export function guidedRooms(random: () => number): Rooms {
  return {
    ready: () => true,
    start({ sampling, maxTokens }, sink) {
      let isCancelled = false;
      const guide = maker.start(sampling.constraint!);
      const next = (count: number): number => {
        const mask = guide.mask();
        const allowed = Array.from({ length: tokenizer.vocabSize }, (_, id) => id).filter((id) => hasBit(mask, id));
        const ends = [tokenizer.eosId, ...(count > 3 ? [vocabulary.thinkEndId] : [])];
        return ends.find((id) => allowed.includes(id)) ?? allowed[Math.floor(random() * allowed.length)]!;
      };
      setImmediate(() => {
        for (let count = 0; count < maxTokens && !isCancelled; count += 1) {
          const id = next(count);
          guide.accept(id);
          sink.onTokens([id]);
          if (id === tokenizer.eosId) return isCancelled ? undefined : sink.onEnd({ kind: 'stop' });
        }
        if (!isCancelled) sink.onEnd({ kind: 'length' });
      });
      return { cancel: () => void (isCancelled = true) };
    },
  };
}
