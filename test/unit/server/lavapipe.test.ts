import assert from 'node:assert/strict';
import { mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { test } from 'node:test';
import { inspect } from 'node:util';
import {
  backportsSource,
  findLavapipe,
  parseDeb822,
  parseOneLine,
  suiteWithMesa,
} from '../../../server/adapter/lavapipe.ts';

test('backports come from the mirror that serves the release, with its key', () => {
  const sources = parseDeb822(`# a comment
Types: deb deb-src
URIs: http://mirror.example/debian
Suites: bookworm bookworm-updates
Components: main contrib
Signed-By: /usr/share/keyrings/key.gpg

Types: deb
URIs: http://mirror.example/debian-security
Suites: bookworm-security
Components: main
`);
  assert.equal(
    backportsSource(sources, 'bookworm'),
    'Types: deb\nURIs: http://mirror.example/debian\nSuites: bookworm-backports\nComponents: main\nSigned-By: /usr/share/keyrings/key.gpg\n',
  );
});

test('an embedded key is taken over with all its lines', () => {
  const key = '\n -----BEGIN PGP PUBLIC KEY BLOCK-----\n .\n mQINBF\n -----END PGP PUBLIC KEY BLOCK-----';
  const sources = parseDeb822(
    `Types: deb\nURIs: http://mirror.example/debian\nSuites: bookworm\nComponents: main\nSigned-By:${key}\n`,
  );
  assert.ok(
    backportsSource(sources, 'bookworm')?.includes(`Signed-By: ${key}\n`),
    inspect(backportsSource(sources, 'bookworm')),
  );
});

test('one-line sources are read with and without options', () => {
  const sources = parseOneLine(`# deb http://mirror.example/old bookworm main
deb-src http://mirror.example/debian bookworm main
deb http://mirror.example/security bookworm-security main
deb [ arch=amd64 signed-by=/key.gpg ] http://mirror.example/debian bookworm main contrib # the mirror
`);
  assert.deepEqual(
    sources.map(({ uris, suites, components }) => [uris[0], suites[0], components.join(' ')]),
    [
      ['http://mirror.example/security', 'bookworm-security', 'main'],
      ['http://mirror.example/debian', 'bookworm', 'main contrib'],
    ],
  );
  assert.equal(
    backportsSource(sources, 'bookworm'),
    'Types: deb\nURIs: http://mirror.example/debian\nSuites: bookworm-backports\nComponents: main\nSigned-By: /key.gpg\n',
  );
});

test('no backports are invented where no source serves the release', () => {
  const off = 'Types: deb\nURIs: http://mirror.example/debian\nSuites: bookworm\nComponents: main\n';
  assert.equal(backportsSource(parseDeb822(`Enabled: no\n${off}`), 'bookworm'), null);
  assert.equal(backportsSource(parseDeb822(off), 'trixie'), null);
  assert.equal(backportsSource(parseDeb822(off.replace('main', 'contrib')), 'bookworm'), null);
});

test('the suite is that of the newest Mesa, if Dawn accepts it', () => {
  const old = 'mesa-vulkan-drivers | 22.3.6-1+deb12u1 | http://mirror.example/debian bookworm/main amd64 Packages\n';
  const recent =
    'mesa-vulkan-drivers | 25.0.7-2~bpo12+1 | http://mirror.example/debian bookworm-backports/main amd64 Packages\n';
  assert.equal(suiteWithMesa(old), null);
  assert.equal(suiteWithMesa(recent + old), 'bookworm-backports');
  assert.equal(suiteWithMesa(''), null);
});

test('the driver file of this architecture is found under its old and its new name', (context) => {
  const folder = mkdtempSync(join(tmpdir(), 'handoff-icd-'));
  context.after(() => rmSync(folder, { recursive: true }));
  writeFileSync(join(folder, 'radeon_icd.x86_64.json'), '{}');
  writeFileSync(join(folder, 'lvp_icd.i686.json'), '{}');
  assert.equal(findLavapipe([folder, join(folder, 'absent')]), null);
  writeFileSync(join(folder, 'lvp_icd.x86_64.json'), '{}');
  assert.equal(findLavapipe([folder]), join(folder, 'lvp_icd.x86_64.json'));
});
