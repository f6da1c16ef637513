// Every action without a mouse: controls are reached with Tab and pressed with Enter, Space and the arrow keys.

import { afterAll, expect } from "vitest";
import type { Page } from "playwright-core";
import { check, shutDown } from "./browser.ts";

afterAll(shutDown);

const TABS_MAX = 150;
const focusedName = (page: Page) => page.evaluate<string>(`(() => {
  const it = document.activeElement;
  if (!it || it === document.body) return "";
  return (it.getAttribute("aria-label") ?? it.labels?.[0]?.innerText ?? it.innerText ?? "").trim().replace(/\\s+/g, " ");
})()`);
const hasOutline = (page: Page) => page.evaluate<boolean>(`(() => {
  const style = getComputedStyle(document.activeElement);
  return style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 1 || document.activeElement.closest(".choice") !== null;
})()`);

/** Moves the focus with Tab to the control of this name. */
async function reach(page: Page, name: string | RegExp): Promise<void> {
  const matches = (found: string) => (typeof name === "string" ? found === name : name.test(found));
  for (let tabs = 0; tabs < TABS_MAX; tabs += 1) {
    if (matches(await focusedName(page))) {
      expect(await hasOutline(page), `no visible focus at ${name}`).toBe(true);
      return;
    }
    await page.keyboard.press("Tab");
  }
  throw new Error(`the keyboard does not reach ${name}`);
}

async function press(page: Page, name: string | RegExp, key = "Enter"): Promise<void> {
  await reach(page, name);
  await page.keyboard.press(key);
}

async function replace(page: Page, name: string | RegExp, text: string): Promise<void> {
  await reach(page, name);
  await page.keyboard.press("Control+A");
  await page.keyboard.type(text);
}

const dialog = (page: Page) => page.getByRole("dialog");

check("a volume is created, grown and deleted by keyboard", { path: "/volumes", role: "operator" }, async (page) => {
  await page.getByText("pg-ledger").waitFor();
  await press(page, "Create volume");
  await dialog(page).waitFor();
  await replace(page, "Name", "typed");
  await replace(page, "Size", "20G");
  await page.keyboard.press("Enter");
  await page.getByRole("heading", { name: "typed", exact: true }).waitFor();
  await press(page, "Grow");
  await replace(page, /^New size/, "30G");
  await page.keyboard.press("Enter");
  await page.getByText("30 GiB").first().waitFor();
  await expect.poll(() => focusedName(page)).toBe("Grow");
  await press(page, "Delete");
  await replace(page, /^Type typed to confirm/, "typed");
  await page.keyboard.press("Enter");
  await page.getByRole("heading", { name: "Volumes", exact: true }).waitFor();
});

check("copies and the client are changed by keyboard", { path: "/volumes/archive", role: "operator" }, async (page) => {
  await page.getByText("copy 1").first().waitFor();
  await press(page, "Attach copy");
  await reach(page, /^Asynchronous/);
  await page.keyboard.press("Space");
  await press(page, "Attach copy");
  await page.getByText("copy 2").first().waitFor();
  await press(page, "Promote");
  await replace(page, /^Type archive to confirm/, "archive");
  await page.keyboard.press("Enter");
  await page.getByText(/^Copy \d of the volume archive was promoted\.$/).waitFor();
  await press(page, "Detach");
  await reach(page, /^Type archive to confirm/);
  await page.keyboard.press("Escape");
  await expect.poll(() => focusedName(page)).toBe("Detach");
});

check("a client is detached by keyboard", { path: "/volumes/scratch", role: "operator" }, async (page) => {
  await page.getByText("batch-7:31").first().waitFor();
  await press(page, "Detach client");
  await replace(page, /^Type scratch to confirm/, "scratch");
  await page.keyboard.press("Enter");
  await page.getByText("pagemesh export nbd scratch").waitFor();
});

check("bricks are found, scrubbed and forgotten by keyboard", { path: "/bricks" }, async (page, { mock }) => {
  mock.world.bricks[5]!.slices = 0;
  await page.getByText("node-1", { exact: true }).waitFor();
  await replace(page, "Filter bricks", "node-1");
  await press(page, "node-1");
  await press(page, "Scrub now");
  await press(page, "Start scrub");
  await page.getByText("scrubbing").waitFor();
  await press(page, "Stop scrub");
  await dialog(page).waitFor();
  await press(page, "Stop scrub");
  await page.getByRole("button", { name: "Scrub now" }).waitFor();
  await press(page, "Scrub now", "Tab");
  await page.keyboard.press("/");
  await page.keyboard.type("node-6");
  await page.getByRole("option", { name: /node-6/ }).waitFor();
  await page.keyboard.press("Enter");
  await page.getByRole("heading", { name: "node-6", exact: true }).waitFor();
  await press(page, "Forget");
  await replace(page, /^Type node-6 to confirm/, "node-6");
  await page.keyboard.press("Enter");
  await page.getByRole("heading", { name: "Bricks", exact: true }).waitFor();
});

check("events are acknowledged, tokens made and revoked, and the login left by keyboard", { path: "/events" }, async (page, { expected }) => {
  expected.push(/401/);
  await page.getByText("12 times").waitFor();
  await press(page, /^Acknowledge event/);
  await page.getByText("Acknowledged by first-admin").waitFor();
  await press(page, "Not acknowledged only", "Space");
  await press(page, "Pause");
  await press(page, "Follow");
  await press(page, "Tokens");
  await page.getByText("contractor").waitFor();
  await press(page, "Create token");
  await replace(page, "Name", "backup");
  await page.keyboard.press("Enter");
  await page.getByText("It is shown only now").waitFor();
  await press(page, "Done");
  await press(page, "Revoke backup");
  await replace(page, /^Type backup to confirm/, "backup");
  await page.keyboard.press("Enter");
  await expect.poll(() => page.getByText("backup").count()).toBe(0);
  await press(page, "Theme: system");
  await press(page, "Log out");
  await page.getByLabel("Token").fill("pm_admin");
  await page.keyboard.press("Enter");
  await page.getByRole("heading", { level: 1 }).waitFor();
});

check("a dialog keeps the focus and returns it", { path: "/volumes/mail", role: "operator" }, async (page) => {
  await press(page, "Delete");
  await dialog(page).waitFor();
  for (let tabs = 0; tabs < 12; tabs += 1) {
    await page.keyboard.press(tabs % 3 === 2 ? "Shift+Tab" : "Tab");
    const isOutside = await page.evaluate<boolean>("document.activeElement !== document.body && !document.activeElement.closest('dialog')");
    expect(isOutside).toBe(false);
  }
  await page.keyboard.press("Escape");
  await expect.poll(() => page.locator("dialog").count()).toBe(0);
  expect(await focusedName(page)).toBe("Delete");
  await page.keyboard.press("Enter");
  await dialog(page).waitFor();
  await press(page, "Cancel");
  await expect.poll(() => focusedName(page)).toBe("Delete");
});

check("charts and stages are switched by keyboard", { path: "/volumes/mail" }, async (page) => {
  await page.getByText("408 µs").waitFor();
  await press(page, "24 h");
  await press(page, "p50");
  await page.getByText("68 µs").first().waitFor();
  await press(page, "flush");
  await page.getByText("No timed flush operations").waitFor();
});
