/** Texts of facts that the embedded model was taught to recall from, with a question and an answer for each fact. */

/** One sentence of a text, and how its fact is asked for; `answer` is the whole answer, full stop included. */
export interface RecallFact {
  readonly sentence: string;
  readonly question: string;
  readonly answer: string;
}

// From the vocabulary of the embedded model's training (scripts/nano/tasks.py); other words are spelt in many tokens.
const words = (list: string): readonly string[] => list.split(' ');
const COLORS = words('red blue green yellow black white orange purple pink brown gray silver gold');
const THINGS = words(
  'anchor apple ball bell book bottle bridge candle chair clock coin cup door drum flag glass hammer hat key kite knife ' +
    'ladder lamp mirror needle oven pencil piano pillow ring rope shoe spoon table ticket train truck violin wagon watch',
);
const NAMES = words('Ada Ben Cleo Dan Eva Finn Gina Hugo Iris Jack Kira Leo Mara Nils Olga Paul Rosa Sam Tara Uma');
const CITIES = words('Oslo Paris Rome Madrid Berlin Vienna Prague Lisbon Dublin Athens Cairo Delhi Tokyo Lima');
const JOBS = words('baker pilot nurse farmer painter driver teacher doctor singer lawyer sailor writer builder dancer');
const FOODS = words('rice bread soup pasta cheese salad curry fish beans noodles pizza pancakes stew');

/** The share of facts about people, as in training; when every person has been spoken of, things go on alone. */
const PEOPLE_SHARE = 0.6;

/**
 * Distinct facts in random order.
 *
 * @param random uniform in [0, 1).
 * @throws RangeError when more are asked for than there are.
 */
export function recallFacts(random: () => number, count: number): RecallFact[] {
  const pick = (list: readonly string[]): string => list[Math.floor(random() * list.length)]!;
  const people = shuffled(
    random,
    NAMES.flatMap((name): RecallFact[] => [
      fact(`${name} lives in`, pick(CITIES), `Where does ${name} live?`),
      fact(`${name} works as a`, pick(JOBS), `What is the job of ${name}?`),
      fact(`${name} likes`, pick(FOODS), `What does ${name} like?`),
    ]),
  );
  const things = shuffled(
    random,
    COLORS.flatMap((color) =>
      THINGS.map((thing): RecallFact => {
        const code = String(100 + Math.floor(random() * 900));
        return fact(`The code of the ${color} ${thing} is`, code, `What is the code of the ${color} ${thing}?`);
      }),
    ),
  );
  if (count > people.length + things.length) throw new RangeError(`${count} facts of ${people.length + things.length}`);
  return Array.from({ length: count }, () => {
    const source = random() < PEOPLE_SHARE || things.length === 0 ? people : things;
    return source.pop() ?? things.pop()!;
  });
}

function fact(start: string, value: string, question: string): RecallFact {
  return { sentence: `${start} ${value}.`, question, answer: `${value}.` };
}

/** Fisher and Yates. */
function shuffled<T>(random: () => number, list: T[]): T[] {
  for (let last = list.length - 1; last > 0; last--) {
    const index = Math.floor(random() * (last + 1));
    [list[last], list[index]] = [list[index]!, list[last]!];
  }
  return list;
}
