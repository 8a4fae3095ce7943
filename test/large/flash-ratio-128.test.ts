/** Odd layers from 3 on of DeepSeek-V4-Flash, every weight at its real size; see test/support/flash-layer.ts. Two minutes, 6 GiB. */
import { testFlashLayer } from '../support/flash-layer.ts';

testFlashLayer('ratio 128, scored');
