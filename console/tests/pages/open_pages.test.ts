// Pages that stay open while something happens to the manager, the token, the stream or a clock.

import { afterAll, expect } from "vitest";
import type { Page } from "playwright-core";
import type { Mock } from "../../mock/server.ts";
import { addEvent } from "../../mock/world.ts";
import { check, shutDown } from "./browser.ts";

afterAll(shutDown);

const HOUR_MS = 3_600_000;

check("changes arrive by the stream", { path: "/volumes" }, async (page, { mock }) => {
  await page.getByText("live", { exact: true }).waitFor();
  const mail = mock.world.volumes.find((it) => it.info.name === "mail")!;
  mail.info.health = "degraded";
  mock.publish("volume", mail.info);
  await page.locator("tr", { hasText: "mail" }).getByText("degraded").waitFor();
  mock.world.volumes = mock.world.volumes.filter((it) => it !== mail);
  mock.publish("volume", { name: "mail", deleted: true });
  await expect.poll(() => page.getByRole("link", { name: "mail", exact: true }).count()).toBe(0);
});

const repeatOften = (mock: Mock) => void (mock.statusEveryMs = 1000);
check("the age of a lost brick counts on, and that of a living one stays small", { path: "/bricks/node-1", prepare: repeatOften }, async (page, { mock }) => {
  await page.getByText("live", { exact: true }).waitFor();
  await page.waitForTimeout(6000);
  const state = page.getByRole("region", { name: "State", exact: true });
  await state.getByText(/^heartbeats arrive, as of (just now|[1-4] s ago)$/).waitFor();
  await page.getByRole("link", { name: "Overview" }).click();
  await page.getByText(/^as of (just now|[1-4] s ago)$/).waitFor();
  Object.assign(mock.world.bricks[0]!, { alive: false, heartbeat_age_ms: 7000 - (Date.now() - mock.world.madeMs) });
  await page.getByRole("link", { name: /Brick node-1 has sent no heartbeat for [789] s/ }).waitFor();
  await page.getByRole("link", { name: /Brick node-1 has sent no heartbeat for 1[3-9] s/ }).waitFor({ timeout: 20_000 });
  await page.getByRole("link", { name: /Brick node-1 has sent no heartbeat/ }).click();
  await page.getByText(/^No heartbeat for [12]\d s: the brick has ended/).waitFor();
  await state.getByText(/^last heartbeat [12]\d s ago$/).waitFor();
});

const overload = (mock: Mock) => void Object.assign(mock, { failing: /whoami/, failingStatus: 503 });
check("a reload during an overload says so and asks again, without a login", { path: "/bricks", prepare: overload }, async (page, { mock, expected }) => {
  expected.push(/503/);
  await page.getByText("The manager does not serve this page now").waitFor();
  await page.getByText("This page tries again every 3 s.").waitFor();
  expect(await page.getByLabel("Token").count()).toBe(0);
  mock.failing = null;
  await page.getByText("node-1", { exact: true }).waitFor();
});

const failLists = (mock: Mock) => void (mock.failing = /v1\/(status|bricks)/);
check("lists that fail while the stream is open are asked for again", { path: "/bricks", prepare: failLists }, async (page, { mock, expected }) => {
  expected.push(/500/);
  await page.getByText("live", { exact: true }).waitFor();
  await page.getByText("The store cannot be read.").waitFor();
  mock.failing = null;
  await page.getByText("node-1", { exact: true }).waitFor({ timeout: 10_000 });
});

check("the focus stays on a problem while its age counts on", {}, async (page) => {
  const link = page.getByRole("link", { name: /Brick node-6 has sent no heartbeat/ });
  await link.focus();
  const before = await link.textContent();
  await expect.poll(() => link.textContent(), { timeout: 10_000 }).not.toBe(before);
  expect(await page.evaluate<string>("document.activeElement.getAttribute('href')")).toBe("/bricks/node-6");
});

check("a stream that falls silent is opened again", { path: "/bricks", prepare: repeatOften }, async (page, { mock }) => {
  await page.getByText("live", { exact: true }).waitFor();
  expect(mock.streamsOpened).toBe(1);
  await page.clock.install();
  const heard = page.evaluate(`new Promise((done) => { const source = new EventSource("/api/v1/watch"); let left = 2; source.addEventListener("status", () => { left -= 1; if (left === 0) { source.close(); done(); } }); })`);
  await heard;
  mock.statusEveryMs = 1e9;
  await page.clock.fastForward(36_000);
  await page.clock.fastForward(2000);
  await expect.poll(() => mock.streamsOpened).toBe(3);
});

check("a manager that restarts is missed, and its changes are read afterwards", { path: "/bricks" }, async (page, { mock, expected }) => {
  expected.push(/ERR_/);
  await page.getByText("live", { exact: true }).waitFor();
  await mock.stop();
  await page.getByText("The manager is unreachable").waitFor({ timeout: 15_000 });
  await page.getByText("polling", { exact: true }).waitFor();
  mock.world.bricks[0]!.name = "renamed";
  await mock.start();
  await page.getByText("renamed").waitFor({ timeout: 20_000 });
  await page.getByText("live", { exact: true }).waitFor({ timeout: 20_000 });
  expect(await page.getByText("The manager is unreachable").count()).toBe(0);
});

check("a revoked token leads back to the login, with the reason", {}, async (page, { mock, expected }) => {
  expected.push(/401/);
  await page.getByText("Busiest volumes").waitFor();
  mock.world.tokens = [];
  await page.getByText("has expired or was revoked").waitFor({ timeout: 15_000 });
});

check("an expired token leads back to the login, and another one to the same page", { path: "/volumes/mail", role: "viewer" }, async (page, { mock, expected }) => {
  expected.push(/401/);
  await page.getByRole("heading", { name: "mail", exact: true }).waitFor();
  mock.world.tokens.find((it) => it.secret === "pm_viewer")!.expires_unix_s = Math.floor(Date.now() / 1000) - 1;
  await page.getByText("an admin makes it with the command below").waitFor({ timeout: 15_000 });
  await page.getByText("pagemesh token create").first().waitFor();
  await page.getByLabel("Token").fill("pm_operator");
  await page.keyboard.press("Enter");
  await page.getByRole("heading", { name: "mail", exact: true }).waitFor();
});

check("a role that was reduced under an open dialog is named by the refusal", { path: "/volumes/scratch", role: "operator" }, async (page, { mock, expected }) => {
  expected.push(/403/);
  await page.getByRole("button", { name: "Grow", exact: true }).click();
  mock.world.tokens.find((it) => it.secret === "pm_operator")!.role = "viewer";
  await page.getByRole("dialog").getByRole("button", { name: "Grow" }).click();
  await page.getByRole("dialog").getByText("This needs the role operator; you are viewer.").waitFor();
});

const refuse = (mock: Mock) => void (mock.refusesStreams = true);
check("a refused stream is named with its way out, and lists are asked for", { path: "/bricks", prepare: refuse }, async (page, { mock, expected }) => {
  expected.push(/503/);
  await page.getByText("No live changes:").waitFor();
  await page.getByText("Close a page or a").waitFor();
  await page.getByText("polling", { exact: true }).waitFor();
  mock.world.bricks[0]!.name = "renamed";
  await page.getByText("renamed").waitFor({ timeout: 15_000 });
  mock.refusesStreams = false;
  await page.getByText("live", { exact: true }).waitFor({ timeout: 20_000 });
  expect(await page.getByText("No live changes:").count()).toBe(0);
});

async function setHidden(page: Page, isHidden: boolean): Promise<void> {
  const state = isHidden ? "hidden" : "visible";
  await page.evaluate(`Object.defineProperty(document, "visibilityState", { value: "${state}", configurable: true }); document.dispatchEvent(new Event("visibilitychange"))`);
}

check("a hidden page holds no stream and reads the lists when it is shown", { path: "/bricks" }, async (page, { mock }) => {
  await page.getByText("live", { exact: true }).waitFor();
  await setHidden(page, true);
  await expect.poll(() => mock.streams).toBe(0);
  mock.world.bricks[0]!.name = "renamed";
  await page.waitForTimeout(300);
  expect(await page.getByText("renamed").count()).toBe(0);
  await setHidden(page, false);
  await page.getByText("renamed").waitFor();
  await expect.poll(() => mock.streams).toBe(1);
});

check("an acknowledgement by another operator arrives on open pages", { path: "/events" }, async (page, { mock }) => {
  await page.getByText("1 event not acknowledged").or(page.getByText("events not acknowledged")).waitFor();
  await page.getByText("live", { exact: true }).waitFor();
  const event = mock.world.events.find((it) => it.kind === "scrub-found")!;
  mock.publish("acknowledged", { seq: event.seq, acknowledged: { by: "night-shift", time_unix_ms: Date.now() } });
  await page.getByText("Acknowledged by night-shift").waitFor();
  await page.getByRole("link", { name: "Overview" }).click();
  await page.getByText("Busiest volumes").waitFor();
  expect(await page.getByText("critical event is not acknowledged").count()).toBe(0);
});

function ahead(mock: Mock): void {
  mock.clockAheadMs = 2 * HOUR_MS;
  for (const event of mock.world.events) event.time_unix_ms += 2 * HOUR_MS;
}
check("another clock of the manager is named, and ages count by it", { prepare: ahead }, async (page, { mock }) => {
  await page.getByText("The manager's clock is 2 h ahead of this browser's").or(page.getByText("The manager's clock is 1 h 59 min ahead")).waitFor();
  await page.getByText(/^11 min .* ago$/).first().waitFor();
  mock.clockAheadMs = 0;
  mock.publish("event", addEvent(mock.world, "brick-returned", "info", { kind: "brick", name: "node-6" }, "The brick sends heartbeats again."));
  await expect.poll(() => page.getByText("The manager's clock is").count(), { timeout: 15_000 }).toBe(0);
});

check("a jump of the browser's clock changes no age of a figure", {}, async (page) => {
  await page.getByText(/reported \d+ s ago/).first().waitFor();
  await page.evaluate(`const real = Date.now; Date.now = () => real() + ${5 * HOUR_MS}`);
  await page.getByText("The manager's clock is 5 h behind this browser's").or(page.getByText("The manager's clock is 4 h 59 min behind")).waitFor({ timeout: 15_000 });
  expect(await page.getByText(/reported \d+ h/).count()).toBe(0);
  await page.getByText("as of just now").or(page.getByText(/as of \d+ s ago/)).waitFor();
  await page.getByText(/^1[12] min .* ago$/).first().waitFor();
});
