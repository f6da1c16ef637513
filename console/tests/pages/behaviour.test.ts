// The controls of each page, each used once, over the mock.

import { afterAll, expect } from "vitest";
import type { Page } from "playwright-core";
import type { Mock } from "../../mock/server.ts";
import { count } from "../../src/text/format.ts";
import { MARKUP } from "../../mock/world.ts";
import { addEvent } from "../../mock/world.ts";
import { check, shutDown } from "./browser.ts";

afterAll(shutDown);

const button = (page: Page, name: string | RegExp) => page.getByRole("button", { name, exact: typeof name === "string" });
const dialog = (page: Page) => page.getByRole("dialog");

/** Waits until the page asks for no list: it reads all of them again when its stream opens. */
async function untilQuiet(page: Page): Promise<void> {
  let lastMs = Date.now();
  page.on("request", (request) => (lastMs = request.url().includes("/api/v1/volumes") ? Date.now() : lastMs));
  await page.getByText("live", { exact: true }).waitFor();
  await expect.poll(() => Date.now() - lastMs, { timeout: 10_000 }).toBeGreaterThan(800);
}

check("login refuses a wrong token with the way out, then opens the asked page", { role: null, path: "/volumes/mail" }, async (page, { expected, context }) => {
  expected.push(/401/);
  await page.getByLabel("Token").fill("pm_wrong");
  await page.keyboard.press("Enter");
  await page.getByRole("alert").getByText("wrong, expired or revoked").waitFor();
  await page.getByText("pagemesh token create", { exact: false }).first().waitFor();
  await page.getByLabel("Token").fill("pm_operator");
  await button(page, "Log in").click();
  await page.getByRole("heading", { name: "mail", exact: true }).waitFor();
  const cookie = (await context.cookies()).find((it) => it.name === "pagemesh_token");
  expect(cookie?.httpOnly).toBe(true);
  await button(page, "Log out").click();
  await page.getByLabel("Token").waitFor();
});

check("first steps follow the cluster", { scenario: "empty" }, async (page, { mock }) => {
  await page.getByText("pagemesh pool create /var/lib/pagemesh/pool --size 64G").waitFor();
  const { makeWorld } = await import("../../mock/world.ts");
  mock.world.bricks = makeWorld("bare").bricks;
  await page.getByText("6 of 6 are alive").waitFor();
});

check("commands are copied", { scenario: "empty" }, async (page, { context, mock }) => {
  await context.grantPermissions(["clipboard-read", "clipboard-write"], { origin: mock.url });
  await page.getByLabel("Copy the commands").click();
  await page.getByText("Copied").waitFor();
  expect(await page.evaluate<string>("navigator.clipboard.readText()")).toContain("pagemesh brick --pool");
});

check("the overview lists troubles that lead to their pages", {}, async (page) => {
  await page.getByText("Needs attention").waitFor();
  await page.getByRole("link", { name: /Brick node-6 has sent no heartbeat/ }).click();
  await page.getByRole("heading", { name: "node-6", exact: true }).waitFor();
  await page.goBack();
  await button(page, "24 h").click();
  await page.locator(".chart canvas").first().waitFor();
  await page.getByText(/reported \d+ s ago/).first().waitFor();
});

check("bricks are filtered by text and state, and the address keeps the filter", { path: "/bricks" }, async (page) => {
  await page.getByLabel("Filter bricks").fill("rack-3");
  await page.getByText("node-5").waitFor();
  expect(await page.getByText("node-1", { exact: true }).count()).toBe(0);
  await page.getByLabel("State").selectOption("lost");
  await page.getByText("node-6").waitFor();
  expect(await page.getByText("node-5", { exact: true }).count()).toBe(0);
  expect(page.url()).toContain("search=rack-3&state=lost");
  await page.reload();
  await page.getByText("node-6").waitFor();
  await page.getByLabel("Filter bricks").fill("none such");
  await button(page, "clear it").click();
  await page.getByText("node-1", { exact: true }).waitFor();
  expect(await page.getByText(MARKUP).count()).toBeGreaterThan(0);
});

check("bricks are ordered by their figures, and the address keeps the order", { scenario: "large", path: "/bricks" }, async (page) => {
  await page.getByText("rack-2", { exact: true }).waitFor();
  await page.getByLabel("Order").selectOption("full");
  await expect.poll(() => page.locator("tr.link .name").first().textContent()).toBe("node-3");
  expect(await page.locator("tr.group").count()).toBe(0);
  expect(page.url()).toContain("order=full");
  await page.getByLabel("Order").selectOption("slow");
  await page.reload();
  const parse = (text: string) => Number.parseFloat(text) * (text.includes("ms") ? 1000 : 1);
  await page.locator("td[data-head='write p99']", { hasText: "s" }).first().waitFor();
  const slowest = await page.locator("td[data-head='write p99']").allTextContents();
  const timed = slowest.filter((text) => text !== "–").map(parse);
  expect(timed.length).toBeGreaterThan(50);
  expect(timed).toEqual(timed.toSorted((a, b) => b - a));
});

check("the overview has the remaining time of a resync", {}, async (page) => {
  await page.getByText(/39 %, about 9 min .*left\./).waitFor();
});

check("a scrub is started and stopped", { path: "/bricks/node-1", role: "operator" }, async (page) => {
  await button(page, "Scrub now").click();
  await dialog(page).getByText("corrects flipped bits").waitFor();
  await button(page, "Start scrub").click();
  await page.getByText("A request to start waits for the next heartbeat.").waitFor();
  await page.getByText("scrubbing").waitFor();
  await button(page, "Stop scrub").click();
  await dialog(page).getByRole("button", { name: "Stop scrub" }).click();
  await button(page, "Scrub now").waitFor();
});

check("a device is added, refused twice, drained, and kept", { path: "/bricks/node-1" }, async (page) => {
  const devices = page.getByRole("region", { name: "Devices", exact: true });
  for (const outcome of ["of this pool", "already"]) {
    await devices.getByRole("button", { name: "Add device" }).click();
    await dialog(page).getByLabel("Absolute path").fill("/dev/nvme2n1");
    await dialog(page).getByLabel(/^Type/).fill("node-1");
    await dialog(page).getByRole("button", { name: "Add device" }).click();
    if (outcome === "already") await dialog(page).getByText("is a device of this pool already").waitFor();
    else await devices.getByText("/dev/nvme2n1").waitFor();
  }
  await dialog(page).getByRole("button", { name: "Cancel" }).click();
  await devices.getByRole("button", { name: "Drain" }).first().click();
  await dialog(page).getByText("move to the other devices").waitFor();
  await button(page, "Start drain").click();
  await devices.getByText(/left, 32.* about/).waitFor();
  await devices.getByRole("button", { name: "Cancel drain" }).click();
  await dialog(page).getByRole("button", { name: "Cancel drain" }).click();
  await expect.poll(() => devices.getByText("draining", { exact: true }).count()).toBe(0);
});

check("a failed device and an error are shown in the list, and on the brick's page", { scenario: "many", path: "/bricks" }, async (page) => {
  const row = page.getByRole("row").filter({ hasText: "node-4" });
  await row.getByText("1 failed device").waitFor();
  await row.getByText("a device had an error").waitFor();
  await row.getByRole("link", { name: "node-4" }).click();
  const devices = page.getByRole("region", { name: "Devices", exact: true });
  expect(await devices.locator(".badge.bad").allTextContents()).toEqual(["failed"]);
  expect(await devices.locator(".badge.warn").allTextContents()).toEqual(["had an error"]);
  await devices.getByText("1 error since the brick started, the last one 1 h 10 min ago.").waitFor();
});

function beginScrub(mock: Mock): void {
  addEvent(mock.world, "scrub-started", "info", { kind: "brick", name: "node-3" }, "A scrub of the pool of the brick node-3 has started.", "manager", 10 * 60_000);
}
check("a scrub shows its remaining time, and its progress and end arrive by themselves", { path: "/bricks/node-3", prepare: beginScrub }, async (page, { mock }) => {
  const scrub = page.getByRole("region", { name: "Scrub", exact: true });
  await scrub.getByText(/^Running, 37 %, about 17 min.* left$/).waitFor();
  const brick = mock.world.bricks[2]!;
  brick.scrub!.progress_percent = 50;
  await scrub.getByText(/^Running, 50 %, about (9 min 5\d s|10 min.*) left$/).waitFor();
  brick.scrub = { ...brick.scrub!, state: "waiting", progress_percent: null, pass: null, passes: 5, next_in_ms: 3_600_000, ended_ms_ago: 0 };
  brick.sessions = 41;
  await scrub.getByText("The next scrub begins in").waitFor();
  await page.getByRole("region", { name: "State", exact: true }).getByText("41", { exact: true }).waitFor();
});

check("a brick is free to be forgotten after its last volume was deleted elsewhere", { scenario: "healthy", path: "/bricks" }, async (page, { mock }) => {
  const id = mock.world.volumes[0]!.layout.segments[0]!.columns[0]!.legs[0]!.brick;
  const brick = mock.world.bricks.find((it) => it.brick === id)!;
  Object.assign(brick, { alive: false, slices: 1 });
  await page.getByRole("link", { name: brick.name!, exact: true }).click();
  await expect.poll(() => button(page, "Forget").getAttribute("title")).toContain("1 slice of");
  await page.evaluate(`fetch("/api/v1/volumes/data?force=true", { method: "DELETE" })`);
  await expect.poll(() => button(page, "Forget").isDisabled()).toBe(false);
});

const silence = (mock: Mock) => void mock.world.silentVolumes.add("mail");
check("a row of a client that has stopped reporting has the age of its figures, and no rate", { path: "/volumes", prepare: silence }, async (page, { mock, expected }) => {
  const row = page.locator("tr", { hasText: "mx-1:88" });
  await row.getByText("reported 10 min ago").waitFor();
  expect(await row.locator("td[data-head='IOPS']").textContent()).toMatch(/^–/);
  expect(await page.locator("tr", { hasText: "pg-ledger" }).getByText("reported").count()).toBe(0);
  expected.push(/500/);
  mock.failing = /v1\/figures$/;
  await page.getByText("Figures are not renewed.").waitFor();
  await page.getByText(/Those below came \d+ s ago/).waitFor();
  await page.getByRole("link", { name: "Bricks" }).click();
  await page.getByText("Figures are not renewed.").waitFor();
  mock.failing = null;
  await expect.poll(() => page.getByText("Figures are not renewed.").count(), { timeout: 10_000 }).toBe(0);
});

check("an idle list of volumes asks for nothing", { path: "/volumes" }, async (page) => {
  await page.getByRole("link", { name: "archive" }).waitFor();
  await untilQuiet(page);
});

check("rows that no longer match the filter go", { path: "/volumes?health=degraded" }, async (page, { mock }) => {
  await page.getByRole("link", { name: "pg-orders" }).waitFor();
  await untilQuiet(page);
  const orders = mock.world.volumes.find((it) => it.info.name === "pg-orders")!;
  mock.publish("volume", { ...orders.info, health: "in-sync" });
  orders.info.health = "in-sync";
  await page.getByText("Nothing matches").waitFor();
});

check("a new volume appears while others change all the time", { path: "/volumes" }, async (page, { mock }) => {
  await page.getByRole("link", { name: "archive" }).waitFor();
  await untilQuiet(page);
  const template = mock.world.volumes[0]!;
  const churn = setInterval(() => mock.publish("volume", { ...template.info, name: "elsewhere" }), 100);
  try {
    mock.world.volumes.push({ ...template, info: { ...template.info, name: "fresh", id: "fresh" } });
    await page.getByRole("link", { name: "fresh" }).waitFor({ timeout: 5000 });
  } finally {
    clearInterval(churn);
  }
});

check("the numbers beside a chart are those of the last minute, not of a step that is not over", {}, async (page) => {
  const chart = page.getByRole("region", { name: "Cluster" }).locator("figure").first();
  const recent = await page.evaluate<number>(`fetch("/api/v1/figures").then((it) => it.json()).then((it) => it.cluster.kinds.find((kind) => kind.kind === "read").operations / it.window_s)`);
  for (const span of ["24 h", "1 h"]) {
    await button(page, span).click();
    await chart.getByText(", last minute").waitFor();
    await expect.poll(() => chart.locator(".line b").first().textContent()).toBe(count(recent));
  }
});

check("only a dead brick without slices is forgotten, by an admin that types its name", { path: "/bricks" }, async (page, { mock }) => {
  await page.getByRole("link", { name: "node-6" }).click();
  expect(await button(page, "Forget").isDisabled()).toBe(true);
  expect(await button(page, "Forget").getAttribute("title")).toContain("6 slices");
  mock.world.bricks[5]!.slices = 0;
  await button(page, "Forget").click();
  expect(await button(page, "Forget brick").isDisabled()).toBe(true);
  await dialog(page).getByRole("textbox").fill("node-6");
  await button(page, "Forget brick").click();
  await page.getByText("node-5").waitFor();
  expect(await page.getByText("node-6", { exact: true }).count()).toBe(0);
});

check("a thousand volumes are paged, searched and filtered by the manager", { scenario: "many", path: "/volumes" }, async (page) => {
  await page.getByText("1241 volumes in the cluster").waitFor();
  expect(await page.locator("tbody tr").count()).toBe(50);
  await button(page, "Next").click();
  await page.getByText("50 rows after").waitFor();
  await button(page, "Previous").click();
  await page.getByText("archive").waitFor();
  await page.getByLabel("Search volumes by name").fill("tenant-0777");
  await page.getByRole("link", { name: "tenant-0777" }).waitFor();
  await expect.poll(() => page.locator("tbody tr").count()).toBe(1);
  await page.getByLabel("Search volumes by name").fill("");
  await page.getByLabel("Health").selectOption("degraded");
  await expect.poll(() => page.locator("tbody tr").count()).toBe(1);
  await page.getByRole("link", { name: "pg-orders" }).click();
  await page.getByRole("heading", { name: "pg-orders", exact: true }).waitFor();
});

check("file systems are found among many volumes", { scenario: "many", path: "/files" }, async (page) => {
  await page.getByText("tenant-0000").waitFor();
  expect(await page.getByText("tenant-0001", { exact: true }).count()).toBe(0);
  await untilQuiet(page);
  const asked: string[] = [];
  page.on("request", (request) => asked.push(request.url()));
  await button(page, "Next").click();
  await page.getByText("50 rows after").waitFor();
  await expect.poll(() => page.getByText("tenant-0000").count()).toBe(0);
  const lists = asked.filter((url) => url.includes("/api/v1/volumes?"));
  expect(lists).toHaveLength(1);
  expect(lists[0]).toContain("content=files");
});

check("a volume is created, after the errors of the form and of the manager", { path: "/volumes", role: "operator" }, async (page, { expected }) => {
  expected.push(/409/);
  await button(page, "Create volume").click();
  await button(page, "Create").click();
  await page.getByText("Give it a name").waitFor();
  await dialog(page).getByLabel("Name").fill("mail");
  await dialog(page).getByLabel("Size").fill("3 apples");
  await page.getByText("Write a size such as 100G").waitFor();
  await dialog(page).getByLabel("Size").fill("20G");
  await dialog(page).getByRole("radio", { name: /^stripe\+mirror/ }).check();
  await dialog(page).getByLabel("Columns", { exact: true }).selectOption("4");
  await page.getByText("pagemesh volume create mail --size 20G --layout stripe+mirror --columns 4 --copies 2").waitFor();
  await button(page, "Create").click();
  await dialog(page).getByText("there already is a volume mail").waitFor();
  await dialog(page).getByLabel("Name").fill("fresh");
  await button(page, "Create").click();
  await page.getByRole("heading", { name: "fresh", exact: true }).waitFor();
  await page.getByText("column 3").waitFor();
});

check("a file system is created", { path: "/files?new=1", role: "operator" }, async (page) => {
  await dialog(page).getByLabel("Name").fill("docs");
  expect(await dialog(page).getByRole("radio").count()).toBe(2);
  await button(page, "Create").click();
  await page.getByText("pagemesh mount docs /mnt/docs").waitFor();
});

check("a volume grows; the manager's refusal shows its hint", { path: "/volumes/mail", role: "operator" }, async (page, { expected }) => {
  expected.push(/507/);
  await button(page, "Grow").click();
  await dialog(page).getByRole("textbox").fill("1G");
  await page.getByText("It must be larger than 120 GiB").waitFor();
  expect(await dialog(page).getByRole("button", { name: "Grow" }).isDisabled()).toBe(true);
  await dialog(page).getByRole("textbox").fill("4P");
  await dialog(page).getByRole("button", { name: "Grow" }).click();
  await dialog(page).getByText("Add a brick, or choose a smaller size.").waitFor();
  await dialog(page).getByRole("textbox").fill("200G");
  await dialog(page).getByRole("button", { name: "Grow" }).click();
  await page.getByText("4 segments").first().waitFor();
  await page.getByText("Segment 3: 80 GiB").waitFor();
});

check("an operator pins a volume to memory", { path: "/volumes/mail", role: "operator" }, async (page) => {
  await button(page, "Tier").click();
  await dialog(page).getByText("obeys.").first().waitFor();
  await dialog(page).getByRole("combobox").selectOption("memory");
  await dialog(page).getByText("A pin reserves no memory").waitFor();
  await button(page, "Set tier").click();
  await page.getByText("Pages stay in memory, and return").waitFor();
});

check("a brick shows the use of its tier", { path: "/bricks/node-1", role: "viewer" }, async (page) => {
  await page.getByText("28 GiB of 32 GiB of memory used (87 %)").waitFor();
  await page.getByText("16 GiB of 32 GiB of flash used").waitFor();
});

check("deletion needs the name and the word on the client", { path: "/volumes/mail", role: "operator" }, async (page, { mock }) => {
  await button(page, "Delete").click();
  const go = button(page, "Delete volume");
  await dialog(page).getByText("mx-1:88 has it attached").waitFor();
  await dialog(page).getByRole("textbox").fill("mai");
  await dialog(page).getByRole("checkbox").check();
  expect(await go.isDisabled()).toBe(true);
  await dialog(page).getByRole("textbox").fill("mail");
  await dialog(page).getByRole("checkbox").uncheck();
  expect(await go.isDisabled()).toBe(true);
  await page.keyboard.press("Escape");
  await button(page, "Delete").click();
  await dialog(page).getByRole("textbox").fill("mail");
  await dialog(page).getByRole("checkbox").check();
  await go.click();
  await page.getByRole("heading", { name: "Volumes", exact: true }).waitFor();
  expect(mock.world.volumes.some((it) => it.info.name === "mail")).toBe(false);
});

check("copies are attached, detached and promoted", { path: "/volumes/archive", role: "operator" }, async (page) => {
  await button(page, "Attach copy").click();
  await dialog(page).getByText("3 instead of 2").waitFor();
  await dialog(page).getByRole("checkbox", { name: /Asynchronous/ }).check();
  await dialog(page).getByRole("checkbox", { name: /promote it/ }).check();
  await dialog(page).getByText("Data loss").waitFor();
  await dialog(page).getByRole("button", { name: "Attach copy" }).click();
  await page.getByText("copy 2").first().waitFor();
  await button(page, "Detach").nth(2).click();
  await dialog(page).getByRole("textbox").fill("archive");
  await button(page, "Detach copy").click();
  await expect.poll(() => page.getByText("copy 2", { exact: true }).count()).toBe(0);
  await button(page, "Promote").first().click();
  await dialog(page).getByText("no write is lost").waitFor();
  await dialog(page).getByRole("textbox").fill("archive");
  await button(page, "Promote copy").click();
  await page.getByText("Copy 0 of the volume archive was promoted.").waitFor();
  expect(await page.getByText("stale", { exact: true }).count()).toBe(0);
});

check("the promotion of a stale copy gives up writes, and the others become stale", { path: "/volumes/pg-orders", role: "operator" }, async (page) => {
  await button(page, "Promote").nth(1).click();
  await dialog(page).getByText("Data loss").waitFor();
  await dialog(page).getByRole("textbox").fill("pg-orders");
  expect(await button(page, "Promote copy").isDisabled()).toBe(true);
  await dialog(page).getByRole("checkbox").check();
  await button(page, "Promote copy").click();
  const first = page.getByRole("region", { name: "Copies" }).getByRole("listitem").first();
  await first.getByText("stale", { exact: true }).waitFor();
});

check("a client is detached", { path: "/volumes/scratch", role: "operator" }, async (page) => {
  await button(page, "Detach client").click();
  await dialog(page).getByText("batch-7:31 has attached scratch").waitFor();
  await dialog(page).getByRole("textbox").fill("scratch");
  await dialog(page).getByRole("button", { name: "Detach client" }).click();
  await page.getByText("pagemesh export nbd scratch").waitFor();
});

check("the stages of reads, writes and flushes are shown for each quantile", { path: "/volumes/mail" }, async (page) => {
  const why = page.getByRole("region", { name: "Where the time goes" });
  await why.getByText("408 µs").waitFor();
  await why.getByRole("button", { name: "p50" }).click();
  await why.getByText("68 µs").waitFor();
  await why.getByRole("button", { name: "flush" }).click();
  await why.getByText("No timed flush operations").waitFor();
});

check("events are filtered, followed, paged and acknowledged", { path: "/events", role: "operator" }, async (page, { mock }) => {
  await page.getByText("12 times").waitFor();
  expect(await page.getByText(MARKUP, { exact: false }).count()).toBeGreaterThan(0);
  await page.getByRole("button", { name: /Acknowledge event/ }).first().click();
  await page.getByText("Acknowledged by on-call").waitFor();
  await button(page, "Older events").click();
  await page.getByText("These are all that match").waitFor();
  await page.getByLabel("Severity").selectOption("critical");
  await page.getByText("scrub found").waitFor();
  await expect.poll(() => page.locator(".events > li").count()).toBe(1);
  await page.getByLabel("Severity").selectOption("");
  await page.getByLabel("Not acknowledged only").check();
  await page.getByText("scrub found").waitFor();
  await page.getByLabel("Not acknowledged only").uncheck();
  await button(page, "Pause").click();
  mock.publish("event", addEvent(mock.world, "brick-returned", "info", { kind: "brick", name: "node-6" }, "The brick node-6 sends heartbeats again."));
  await page.getByText("1 new event").waitFor();
  expect(await page.getByText("sends heartbeats again").count()).toBe(0);
  await button(page, "Follow").click();
  await page.getByText("sends heartbeats again").waitFor();
});

check("tokens are made, shown once, and revoked", { path: "/tokens" }, async (page) => {
  await page.getByText("yours").waitFor();
  await page.getByText("expired", { exact: true }).waitFor();
  await button(page, "Create token").click();
  await dialog(page).getByLabel("Name").fill("backup");
  await dialog(page).getByRole("radio", { name: /operator/ }).check();
  await dialog(page).getByLabel("Expires").selectOption("1 day");
  await button(page, "Create").click();
  await page.getByText("It is shown only now").waitFor();
  await page.getByText(/^pm_backup/).waitFor();
  await button(page, "Done").click();
  expect(await page.getByText(/^pm_backup/).count()).toBe(0);
  await button(page, "Revoke backup").click();
  await dialog(page).getByRole("textbox").fill("backup");
  await button(page, "Revoke token").click();
  await expect.poll(() => page.getByText("backup").count()).toBe(0);
});

check("a viewer sees no change, and the reason", { path: "/volumes/mail", role: "viewer" }, async (page) => {
  await page.getByText("Changing it needs the role operator. You have the role viewer.").waitFor();
  for (const name of ["Grow", "Delete", "Detach client", "Attach copy", "Promote", "Detach"]) expect(await button(page, name).count()).toBe(0);
  await page.getByRole("link", { name: "Bricks" }).click();
  await page.getByRole("link", { name: "node-1" }).click();
  await page.getByText("Scrubbing needs the role operator").waitFor();
  expect(await page.getByRole("link", { name: "Tokens" }).count()).toBe(0);
  await page.goto(new URL("/tokens", page.url()).href);
  await page.getByText("Only admins see tokens").waitFor();
});

check("a deleted volume and a wrong address say what to do", { path: "/volumes/none" }, async (page, { expected }) => {
  expected.push(/404/);
  await page.getByText("There is no volume none").waitFor();
  await page.goto(new URL("/bricks/none", page.url()).href);
  await page.getByText("There is no brick none").waitFor();
});

check("events that cannot be read are no empty list", { path: "/bricks/node-1", prepare: (mock) => void (mock.failing = /events/) }, async (page, { mock, expected }) => {
  expected.push(/500/);
  await page.getByRole("region", { name: "Events of the brick" }).getByText("The store cannot be read.").waitFor();
  await page.getByRole("link", { name: "Overview" }).click();
  await page.getByRole("region", { name: "Latest events" }).getByText("The store cannot be read.").waitFor();
  expect(await page.getByText("Nothing has happened yet").count()).toBe(0);
  mock.failing = null;
  mock.publish("event", addEvent(mock.world, "brick-returned", "info", { kind: "brick", name: "node-6" }, "The brick sends heartbeats again."));
  await page.getByText("scrub found").waitFor();
});

check("search by keyboard finds bricks, volumes and pages", {}, async (page) => {
  await page.getByText("Busiest volumes").waitFor();
  await page.keyboard.press("/");
  await page.keyboard.type("pg-");
  await page.getByRole("option", { name: /pg-orders/ }).waitFor();
  await page.keyboard.press("ArrowDown");
  await page.keyboard.press("Enter");
  await page.getByRole("heading", { name: "pg-orders", exact: true }).waitFor();
  await page.keyboard.press("/");
  await page.keyboard.type("no such thing");
  await page.getByText("Nothing has").waitFor();
  await page.keyboard.press("Escape");
  expect(await dialog(page).count()).toBe(0);
  await page.keyboard.press("Tab");
  expect(await page.evaluate<boolean>("getComputedStyle(document.activeElement).outlineStyle !== 'none'")).toBe(true);
});

check("the theme is switched and remembered", {}, async (page) => {
  const ground = () => page.evaluate<string>("getComputedStyle(document.documentElement).backgroundColor");
  await page.getByText("Busiest volumes").waitFor();
  const light = await ground();
  await page.getByLabel("Theme: system").click();
  await page.getByLabel("Theme: light").click();
  await expect.poll(ground).not.toBe(light);
  const dark = await ground();
  await page.reload();
  await page.getByText("Busiest volumes").waitFor();
  expect(await ground()).toBe(dark);
});

check("an operator expires an NFS client", { path: "/nfs", role: "operator" }, async (page) => {
  await button(page, "home").click();
  const row = page.getByRole("row").filter({ hasText: "db-3.example.org" });
  await row.getByText("active").waitFor();
  await row.getByRole("button", { name: /^Expire/ }).click();
  await dialog(page).getByText("The client loses 412 opens and 96 locks").waitFor();
  await button(page, "Expire client").click();
  await dialog(page).waitFor({ state: "detached" });
  await row.waitFor({ state: "detached" });
});
