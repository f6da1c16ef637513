// Invented figures: smooth load with noise, a gap, and a peak, reproducible for each name.

import type { FigureKind, FigureSeries, FigureValues, MediaFigures, OpKind, RecentFigures, Span, StageFigures, SubjectFigures } from "../src/api/types.ts";
import { randomFrom } from "./random.ts";
import { VOLUMES_LARGE, type World } from "./world.ts";

function seedOf(text: string): number {
  let hash = 2166136261;
  for (const letter of text) hash = Math.imul(hash ^ letter.charCodeAt(0), 16777619);
  return hash >>> 0;
}

const BASE: Record<OpKind, { rate: number; bytes: number; p50: number; p99: number }> = {
  read: { rate: 8200, bytes: 8192, p50: 21_000, p99: 180_000 },
  write: { rate: 4100, bytes: 6144, p50: 38_000, p99: 410_000 },
  flush: { rate: 160, bytes: 0, p50: 220_000, p99: 2_900_000 },
};

function values(kind: OpKind, seed: number, times: number[], step: number, scale: number): FigureValues {
  const random = randomFrom(seed ^ seedOf(kind));
  const base = BASE[kind];
  const out: FigureValues = { operations: [], kib: [], p50_ns: [], p99_ns: [] };
  times.forEach((_, index) => {
    const wave = 1 + 0.35 * Math.sin(index / 23 + seed) + 0.15 * (random() - 0.5);
    const peak = Math.abs(index - times.length * 0.7) < 6 ? 1.9 : 1;
    const operations = Math.round(base.rate * scale * wave * peak * step);
    out.operations.push(operations);
    out.kib!.push(Math.round((operations * base.bytes) / 1024));
    out.p50_ns.push(Math.round(base.p50 * (0.9 + random() * 0.2) * Math.sqrt(peak)));
    out.p99_ns.push(Math.round(base.p99 * (0.8 + random() * 0.5) * peak * peak));
  });
  return out;
}

export function series(subject: string, span: Span, scale: number): FigureSeries {
  const step = span === "1h" ? 10 : 300;
  const length = span === "1h" ? 360 : 288;
  const last = Math.floor(Date.now() / 1000 / step) * step;
  const seed = seedOf(subject);
  const all = Array.from({ length }, (_, index) => last - (length - 1 - index) * step);
  const times = scale === 0 ? [] : all.filter((_, index) => index < length * 0.42 || index > length * 0.47);
  // The last step is still open: a part of its operations is to come.
  const part = (Date.now() / 1000 - last) / step;
  const kind = (of: OpKind) => {
    const all = values(of, seed, times, step, scale);
    for (const sums of [all.operations, all.kib ?? []]) if (sums.length > 0) sums.push(Math.round((sums.pop() ?? 0) * part));
    return all;
  };
  return { step_s: step, last_reported_us_ago: scale === 0 ? null : 2_400_000, is_shortened: false, time_unix_s: times, read: kind("read"), write: kind("write"), flush: kind("flush") };
}

function silent(name: string): SubjectFigures {
  const kinds = (Object.keys(BASE) as OpKind[]).map((kind): FigureKind => ({ kind, operations: 0, bytes: 0, p50_ns: null, p99_ns: null }));
  return { name, last_reported_us_ago: 600_000_000, kinds };
}

function subject(name: string, scale: number): SubjectFigures {
  const random = randomFrom(seedOf(name));
  const kinds = (Object.keys(BASE) as OpKind[]).map((kind): FigureKind => {
    const operations = Math.round(BASE[kind].rate * 60 * scale * (0.5 + random()));
    return { kind, operations, bytes: operations * BASE[kind].bytes, p50_ns: BASE[kind].p50, p99_ns: Math.round(BASE[kind].p99 * (0.5 + random())) };
  });
  return { name, last_reported_us_ago: Math.round(1_000_000 + random() * 6_000_000), kinds };
}

const MEDIA: MediaFigures = { data_bytes: 3_221_225_472, journal_bytes: 50_331_648, table_bytes: 67_108_864 };

export function recent(world: World): RecentFigures {
  const isLarge = world.volumes.length >= VOLUMES_LARGE;
  const attached = world.volumes.filter((it) => isLarge || it.info.attached);
  return {
    window_s: 60,
    cluster: attached.length > 0 ? subject("cluster", 1) : null,
    volumes: attached.map((it, index) => (world.silentVolumes.has(it.info.name) ? silent(it.info.name) : subject(it.info.name, 0.4 / (index + 1)))),
    bricks: world.bricks.filter((it) => it.alive && it.slices > 0).map((it) => ({ ...subject(it.name || it.brick, 0.2), media: MEDIA })),
    media: attached.length > 0 ? { written: MEDIA, per_user_byte: 2.0731, metadata_per_user_byte: 0.0731 } : null,
  };
}

export function why(kind: string, quantile: number, isReported: boolean): StageFigures {
  const none: StageFigures = { kind, quantile, last_reported_us_ago: null, operations: 0, timed: 0, latency_ns: null, around: 0, stages_ns: null, mean_stages_ns: null };
  if (!isReported || kind === "flush") return none;
  const factor = quantile > 0.9 ? 6 : 1;
  return {
    ...none, last_reported_us_ago: 2_400_000, operations: 246_120, timed: 3845, latency_ns: 68_000 * factor, around: 91,
    stages_ns: { queue: 4_100 * factor * factor, lock: 1_300 * factor, fabric: 21_400 * factor, brick: 6_200 * factor, media: 11_900 * factor, finish: 2_100 },
    mean_stages_ns: { queue: 4_100, lock: 1_300, fabric: 21_400, brick: 6_200, media: 11_900, finish: 2_100 },
  };
}
