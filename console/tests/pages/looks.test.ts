// Every page at three widths in both themes: nothing scrolls sideways, axe finds nothing, and a picture is taken.

import { afterAll, describe, expect, test } from "vitest";
import { addEvent } from "../../mock/world.ts";
import { launch, open, overflow, shoot, shutDown, THEMES, violations, WIDTHS, type Wanted } from "./browser.ts";

interface Case extends Wanted {
  name: string;
  shows: string;
  press?: string;
  /** Errors of the browser's console that belong to the case. */
  expects?: RegExp;
}
const CASES: Case[] = [
  { name: "login", role: null, shows: "Token" },
  { name: "first-run", scenario: "empty", shows: "First steps" },
  { name: "no-volumes", scenario: "bare", shows: "First steps" },
  { name: "overview", shows: "Busiest volumes" },
  { name: "overview-healthy", scenario: "healthy", shows: "Healthy" },
  { name: "bricks", path: "/bricks", shows: "rack-2" },
  { name: "overview-large", scenario: "large", shows: "Busiest volumes" },
  { name: "bricks-large", scenario: "large", path: "/bricks?order=slow", shows: "node-77" },
  { name: "volumes-large", scenario: "large", path: "/volumes", shows: "pg-ledger" },
  { name: "banners", path: "/volumes", shows: "No live changes", expects: /503/, prepare: (mock) => Object.assign(mock, { refusesStreams: true, clockAheadMs: 7_200_000 }) },
  { name: "volumes-loading", path: "/volumes", shows: "Loading volumes", prepare: (mock) => void (mock.silent = /volumes/) },
  { name: "volumes-error", path: "/volumes", shows: "The store cannot be read", expects: /500/, prepare: (mock) => void (mock.failing = /volumes/) },
  { name: "overview-error", shows: "The store cannot be read", expects: /500/, prepare: (mock) => void (mock.failing = /status|bricks|figures|events/) },
  { name: "brick-error", path: "/bricks/node-1", shows: "The store cannot be read", expects: /500/, prepare: (mock) => void (mock.failing = /figures|events/) },
  { name: "volume-loading", path: "/volumes/mail", shows: "Loading the stages", prepare: (mock) => void (mock.silent = /why|figures|events/) },
  { name: "search", shows: "Busiest volumes", press: "Search bricks and volumes" },
  { name: "brick", path: "/bricks/node-5", shows: "Operations of node-5" },
  { name: "brick-scrubbing", path: "/bricks/node-3", shows: "left", prepare: (mock) => void addEvent(mock.world, "scrub-started", "info", { kind: "brick", name: "node-3" }, "A scrub of the pool of the brick node-3 has started.", "manager", 600_000) },
  { name: "overloaded", path: "/volumes", shows: "does not serve this page now", expects: /503/, prepare: (mock) => void Object.assign(mock, { failing: /whoami/, failingStatus: 503 }) },
  { name: "volumes-old-figures", path: "/volumes", shows: "reported 10 min", prepare: (mock) => void mock.world.silentVolumes.add("mail").add("pg-orders") },
  { name: "bricks-no-figures", path: "/bricks", shows: "Figures are not renewed", expects: /500/, prepare: (mock) => void (mock.failing = /v1\/figures$/) },
  { name: "brick-lost", path: "/bricks/node-6", shows: "No heartbeat" },
  { name: "volumes", path: "/volumes", shows: "pg-ledger" },
  { name: "volume-degraded", path: "/volumes/pg-orders", shows: "Where the time goes" },
  { name: "volume-resync", path: "/volumes/pg-ledger", shows: "left" },
  { name: "volume-replica", path: "/volumes/dr-orders", shows: "Lag" },
  { name: "volume-wide", path: "/volumes/vm-images", shows: "column 3" },
  { name: "volume-create", path: "/volumes?new=1", shows: "What will happen" },
  { name: "volume-delete", path: "/volumes/pg-orders", shows: "Delete", press: "Delete" },
  { name: "volume-grow", path: "/volumes/mail", shows: "Grow", press: "Grow" },
  { name: "files", path: "/files", shows: "web-assets" },
  { name: "file-system", path: "/files/home", shows: "limit of all files" },
  { name: "volume-snapshots", path: "/volumes/mail", shows: "Show all 32" },
  { name: "schedules", path: "/schedules", shows: "nightly" },
  { name: "nfs", path: "/nfs", shows: "web-assets", press: "home" },
  { name: "events", path: "/events", shows: "Older events" },
  { name: "tokens", path: "/tokens", shows: "contractor" },
  { name: "viewer", path: "/volumes/mail", role: "viewer", shows: "needs the role operator" },
  { name: "unknown", path: "/nothing/here/at/all", shows: "There is nothing at" },
];
const only = process.env["ONLY"];

afterAll(shutDown);

describe.each(CASES.filter((it) => !only || it.name.includes(only)))("$name", (wanted) => {
  test.each(THEMES)("is legible and accessible in the %s theme", async (theme) => {
    await launch();
    const opened = await open({ ...wanted, theme, width: 1440 });
    opened.expected.push(...(wanted.role === null ? [/401/] : []), ...(wanted.expects ? [wanted.expects] : []));
    try {
      const { page } = opened;
      await page.getByText(wanted.shows).first().waitFor();
      if (wanted.press) await page.getByRole("button", { name: wanted.press, exact: true }).click();
      for (const width of WIDTHS) {
        await page.setViewportSize({ width, height: width < 600 ? 844 : 900 });
        await page.waitForTimeout(250);
        await shoot(page, wanted.name, width, theme);
        expect(await overflow(page), `sideways at ${width}`).toBeLessThanOrEqual(0);
        expect(await violations(page), `axe at ${width}`).toEqual([]);
      }
    } finally {
      await opened.close();
    }
  });
});
