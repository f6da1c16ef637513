// The console that a real manager serves: make console-real, or PAGEMESH_MANAGER=URL PAGEMESH_TOKEN=pm_… npm run pages --
// real, with an admin token and at least three bricks in three failure domains. It makes and deletes a volume and a token
// of its own.

import { afterAll, expect, test } from "vitest";
import type { BrowserContext, Page } from "playwright-core";
import { launch, overflow, shoot, shutDown, violations } from "./browser.ts";

const manager = process.env["PAGEMESH_MANAGER"] ?? "";
const token = process.env["PAGEMESH_TOKEN"] ?? "";
const name = `console-test-${process.pid}`;
/** Longer than the manager takes to publish a heartbeat, also on a loaded machine. */
const PUBLISHED_MS = 30_000;

afterAll(shutDown);

const button = (page: Page, of: string) => page.getByRole("button", { name: of, exact: true });
const dialog = (page: Page) => page.getByRole("dialog");

/** Types the name that a dialog asks for, and presses its button. */
async function confirm(page: Page, word: string, action: string): Promise<void> {
  await dialog(page).getByRole("textbox").fill(word);
  await dialog(page).getByRole("button", { name: action, exact: true }).click();
  await expect.poll(() => dialog(page).count()).toBe(0);
}

async function logIn(page: Page): Promise<void> {
  const answer = await page.goto(`${manager}/volumes`);
  expect(answer?.headers()["content-security-policy"]).toContain("default-src 'self'");
  await page.getByLabel("Token").fill(token);
  await button(page, "Log in").click();
  await page.getByRole("heading", { name: "Volumes", exact: true }).waitFor();
  await page.getByText("live", { exact: true }).waitFor();
}

async function createAndGrow(page: Page): Promise<void> {
  await button(page, "Create volume").click();
  await dialog(page).getByLabel("Name").fill(name);
  await dialog(page).getByLabel("Size").fill("64M");
  await button(page, "Create").click();
  await page.getByRole("heading", { name, exact: true }).waitFor();
  await button(page, "Grow").click();
  await dialog(page).getByRole("textbox").fill("128M");
  await dialog(page).getByRole("button", { name: "Grow" }).click();
  await page.getByText("128 MiB").first().waitFor();
  await page.getByText("volume grown").first().waitFor();
}

async function changeCopies(page: Page): Promise<void> {
  const copies = page.getByRole("region", { name: "Copies" });
  await button(page, "Attach copy").click();
  await dialog(page).getByText("3 instead of 2").waitFor();
  await dialog(page).getByRole("button", { name: "Attach copy", exact: true }).click();
  await copies.getByText("copy 2", { exact: true }).waitFor();
  await copies.getByRole("listitem").filter({ hasText: "copy 2" }).getByRole("button", { name: "Detach", exact: true }).click();
  await confirm(page, name, "Detach copy");
  await expect.poll(() => copies.getByText("copy 2", { exact: true }).count()).toBe(0);
  await copies.getByRole("listitem").filter({ hasText: "copy 1" }).getByRole("button", { name: "Promote", exact: true }).click();
  await dialog(page).getByText("no write is lost").waitFor();
  await confirm(page, name, "Promote copy");
  await page.getByText(`Copy 1 of the volume ${name} was promoted`).waitFor();
}

async function acknowledgeEvent(page: Page): Promise<void> {
  await page.goto(`${manager}/events?subject=${encodeURIComponent(`volume:${name}`)}`);
  const event = page.getByRole("listitem").filter({ hasText: `Copy 1 of the volume ${name} was promoted` });
  await event.getByRole("button", { name: /Acknowledge event/ }).click();
  await event.getByText("Acknowledged by").waitFor();
}

async function makeAndRevokeToken(page: Page, context: BrowserContext): Promise<void> {
  await page.goto(`${manager}/tokens`);
  await button(page, "Create token").click();
  await dialog(page).getByLabel("Name").fill(name);
  await dialog(page).getByRole("radio", { name: /viewer/ }).check();
  await button(page, "Create").click();
  const made = (await page.getByText(/^pm_/).first().textContent())!.trim();
  await button(page, "Done").click();
  const ask = () => context.request.get(`${manager}/api/v1/whoami`, { headers: { Authorization: `Bearer ${made}`, Cookie: "" } });
  expect((await (await ask()).json()) as unknown).toMatchObject({ name, role: "viewer" });
  await button(page, `Revoke ${name}`).click();
  await confirm(page, name, "Revoke token");
  await expect.poll(() => page.getByText(name, { exact: true }).count()).toBe(0);
  expect((await ask()).status()).toBe(401);
}

/** The end of the scrub arrives by the stream: the page is not loaded again. */
async function scrub(page: Page, brick: string): Promise<void> {
  await page.goto(manager + brick);
  const completed = page.getByRole("region", { name: "Scrub", exact: true }).getByText(/\d+ completed scrubs? since/);
  const passes = async () => Number.parseInt((await completed.textContent()) ?? "", 10);
  const before = await passes();
  await button(page, "Scrub now").click();
  await button(page, "Start scrub").click();
  await page.getByText("scrub started").first().waitFor({ timeout: PUBLISHED_MS });
  await expect.poll(passes, { timeout: PUBLISHED_MS }).toBeGreaterThan(before);
  await button(page, "Scrub now").waitFor();
}

async function lookAtPages(page: Page, brick: string): Promise<void> {
  for (const path of ["/", "/bricks", brick, "/volumes", `/volumes/${name}`, "/files", "/events", "/tokens"]) {
    await page.goto(manager + path);
    await page.getByRole("heading", { level: 1 }).waitFor();
    await page.waitForTimeout(700);
    expect(await page.getByRole("alert").allTextContents(), path).toEqual([]);
    expect(await overflow(page), path).toBeLessThanOrEqual(0);
    expect(await violations(page), path).toEqual([]);
    await shoot(page, `real${path.replaceAll("/", "-")}`, 1440, "light");
  }
}

/** The slices of a brick fall on its open page while another page deletes the volume. */
async function deleteVolume(page: Page, brickPage: Page, brick: string): Promise<void> {
  await brickPage.goto(manager + brick);
  await brickPage.getByText("live", { exact: true }).waitFor();
  const slices = () => brickPage.locator("dl.facts > div", { hasText: /^slices/ }).locator("dd").textContent();
  const before = Number.parseInt((await slices()) ?? "", 10);
  expect(before).toBeGreaterThan(0);
  await page.goto(`${manager}/volumes/${name}`);
  await button(page, "Delete").click();
  await confirm(page, name, "Delete volume");
  await page.getByRole("heading", { name: "Volumes", exact: true }).waitFor();
  await expect.poll(async () => Number.parseInt((await slices()) ?? "", 10), { timeout: PUBLISHED_MS }).toBeLessThan(before);
}

test.skipIf(!manager || !token)("every page and change works before a real manager", { timeout: 180_000 }, async () => {
  const context = await (await launch()).newContext({ viewport: { width: 1440, height: 900 }, reducedMotion: "reduce" });
  context.setDefaultTimeout(15_000);
  const errors: string[] = [];
  context.on("console", (message) => {
    if (message.type() === "error") errors.push(`${message.text()} ${message.location().url}`);
  });
  context.on("weberror", (error) => errors.push(String(error.error())));
  try {
    const page = await context.newPage();
    await logIn(page);
    errors.length = 0; // The first question without a cookie is refused.
    await createAndGrow(page);
    await changeCopies(page);
    const brick = (await page.locator("main a[href^='/bricks/']").first().getAttribute("href"))!;
    await acknowledgeEvent(page);
    await makeAndRevokeToken(page, context);
    await scrub(page, brick);
    await lookAtPages(page, brick);
    await deleteVolume(page, await context.newPage(), brick);
    expect(errors).toEqual([]);
  } finally {
    await context.close();
  }
});
