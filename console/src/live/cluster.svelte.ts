// The cluster as the page last heard of it: status, bricks, changes of volumes, events, figures. The stream brings
// changes; the lists are read again after every (re)connection, and by polling while there is no stream.

import * as calls from "../api/calls.ts";
import { asApiError, type ApiError } from "../api/client.ts";
import type { Acknowledgement, BrickInfo, Changed, ClusterStatus, EventRecord, RecentFigures, SubjectFigures, VolumeInfo } from "../api/types.ts";
import { mergeEvents, withAcknowledgements } from "../text/events.ts";
import { withChanges } from "../text/order.ts";
import { monotonicMs, secondsSince } from "./clock.svelte.ts";
import { session } from "./session.svelte.ts";
import { watch } from "./watch.ts";

const POLL_MS = 5000;
const PATIENCE_MS = 100;
const FIGURES_MS = 5000;
/** Changes of bricks are shown together: a heartbeat of each brick changes all of them at once. */
const BRICKS_MS = 50;
const EVENTS_KEPT = 200;
const ACKNOWLEDGEMENTS_KEPT = 1000;

export type VolumeListener = (name: string, volume: VolumeInfo | null) => void;

class Cluster {
  status = $state.raw<ClusterStatus | null>(null);
  bricks = $state.raw<BrickInfo[]>([]);
  /** When the status was last heard, by `monotonicMs`. The manager repeats it, so that all that the page shows is as new. */
  heardAt = $state(0);
  isLoaded = $state(false);
  error = $state.raw<ApiError | null>(null);
  isStreaming = $state(false);
  /** Why the manager refused the stream, until it opens one. */
  streamRefusal = $state.raw<ApiError | null>(null);
  startedMs = $state<number | null>(null);
  /** Events since the page began to listen, the newest first. */
  events = $state.raw<EventRecord[]>([]);
  /** Acknowledgements since the page began to listen, by the numbers of their events. */
  acknowledgements = $state.raw<ReadonlyMap<number, Acknowledgement>>(new Map());
  figures = $state.raw<RecentFigures | null>(null);
  figuresAt = $state(0);
  figuresError = $state.raw<ApiError | null>(null);
  /** Rises when lists have to be read again: after a reconnection, and with each poll. */
  generation = $state(0);

  readonly #volumeFigures = $derived(new Map(this.figures?.volumes.map((it) => [it.name, it])));
  readonly #brickFigures = $derived(new Map(this.figures?.bricks.map((it) => [it.name, it])));
  /** When each brick was heard, by `monotonicMs`. */
  readonly #bricksAt = new WeakMap<BrickInfo, number>();
  /** Changes of bricks that are not in `bricks` yet. */
  #changes: Changed<BrickInfo>[] = [];
  #changesDue: ReturnType<typeof setTimeout> | undefined;
  /** Changes since the list of bricks was asked for; null unless it is. */
  #meanwhile: Changed<BrickInfo>[] | null = null;
  #reloads = 0;
  #listeners = new Set<VolumeListener>();
  #stop: (() => void)[] = [];

  /** Begins to listen; calls nest no deeper than one. */
  start(): void {
    this.stop();
    const close = watch({
      hello: (hello) => {
        this.isStreaming = true;
        this.streamRefusal = null;
        this.startedMs = hello.started_unix_ms ?? null;
        session.unreachableSince = null;
        void this.reload();
      },
      status: (status) => this.#take(status),
      brick: (change) => this.#brick(change),
      volume: (change) => {
        const gone = "deleted" in change;
        for (const heard of this.#listeners) heard(change.name, gone ? null : change);
      },
      event: (event) => this.addEvent(event),
      acknowledged: ({ seq, acknowledged }) => this.acknowledge(seq, acknowledged),
      refused: (error) => (this.streamRefusal = error),
      lost: () => {
        this.isStreaming = false;
        void this.reload();
      },
    });
    const poll = setInterval(() => {
      if (!this.isStreaming || this.error) void this.reload();
    }, POLL_MS);
    const figures = setInterval(() => void this.#readFigures(), FIGURES_MS);
    // The lists have to be read after the stream has begun, so they wait for it, but not for long.
    const patience = setTimeout(() => {
      if (!this.isStreaming) void this.reload();
    }, PATIENCE_MS);
    this.#stop = [close, () => clearInterval(poll), () => clearInterval(figures), () => clearTimeout(patience), () => this.#applyChanges()];
    void this.#readFigures();
  }

  stop(): void {
    for (const end of this.#stop) end();
    this.#stop = [];
    this.isStreaming = false;
    this.streamRefusal = null;
  }

  /** Forgets everything, so that the page of the next token shows nothing of this one's. */
  clear(): void {
    this.stop();
    this.status = null;
    this.bricks = [];
    this.events = [];
    this.acknowledgements = new Map();
    this.figures = null;
    this.figuresError = null;
    this.isLoaded = false;
    this.error = null;
  }

  async reload(): Promise<void> {
    this.#reloads += 1;
    const mine = this.#reloads;
    this.#meanwhile = [];
    try {
      const [status, bricks] = await Promise.all([calls.status(), calls.bricks()]);
      if (mine !== this.#reloads) return;
      this.#take(status);
      for (const brick of bricks) this.#bricksAt.set(brick, monotonicMs());
      // A change that came meanwhile may be newer than the list.
      this.bricks = withChanges(bricks, this.#meanwhile);
      this.#meanwhile = null;
      this.#changes = [];
      this.isLoaded = true;
      this.error = null;
      this.generation += 1;
    } catch (error) {
      if (mine === this.#reloads) this.error = asApiError(error);
    }
  }

  onVolume(heard: VolumeListener): () => void {
    this.#listeners.add(heard);
    return () => this.#listeners.delete(heard);
  }

  addEvent(event: EventRecord): void {
    this.events = mergeEvents(this.events, [event]).slice(0, EVENTS_KEPT);
  }

  acknowledge(seq: number, by: Acknowledgement): void {
    this.acknowledgements = new Map([...this.acknowledgements, [seq, by] as const].slice(-ACKNOWLEDGEMENTS_KEPT));
  }

  /** Events of several lists as one, with the acknowledgements that came after the lists. */
  merge(...lists: EventRecord[][]): EventRecord[] {
    return withAcknowledgements(mergeEvents(...lists), this.acknowledgements);
  }

  brick(name: string): BrickInfo | null {
    return this.bricks.find((it) => it.name === name || it.brick === name) ?? null;
  }

  /** The seconds since a brick was heard; renewed each second. */
  heardAgo(brick: BrickInfo): number {
    return secondsSince(this.#bricksAt.get(brick) ?? this.heardAt);
  }

  volumeFigures(name: string): SubjectFigures | null {
    return this.#volumeFigures.get(name) ?? null;
  }

  brickFigures(brick: BrickInfo): SubjectFigures | null {
    return this.#brickFigures.get(brick.name || brick.brick) ?? this.#brickFigures.get(brick.brick) ?? null;
  }

  #take(status: ClusterStatus): void {
    this.status = status;
    this.heardAt = monotonicMs();
  }

  #brick(change: Changed<BrickInfo>): void {
    if (!("deleted" in change)) this.#bricksAt.set(change, monotonicMs());
    this.#changes.push(change);
    this.#meanwhile?.push(change);
    this.#changesDue ??= setTimeout(() => this.#applyChanges(), BRICKS_MS);
  }

  #applyChanges(): void {
    clearTimeout(this.#changesDue);
    this.#changesDue = undefined;
    if (this.#changes.length === 0) return;
    this.bricks = withChanges(this.bricks, this.#changes);
    this.#changes = [];
  }

  async #readFigures(): Promise<void> {
    try {
      this.figures = await calls.recentFigures();
      this.figuresAt = monotonicMs();
      this.figuresError = null;
    } catch (error) {
      this.figuresError = asApiError(error);
    }
  }
}

export const cluster = new Cluster();
