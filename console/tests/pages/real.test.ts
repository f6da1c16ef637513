// The console that a real manager serves: PAGEMESH_MANAGER=URL PAGEMESH_TOKEN=pm_… npm run pages -- real, with an admin
// token and at least two bricks in two failure domains. It makes and deletes a volume of its own.

import { afterAll, expect, test } from "vitest";
import { launch, overflow, shoot, shutDown, violations } from "./browser.ts";

const manager = process.env["PAGEMESH_MANAGER"];
const token = process.env["PAGEMESH_TOKEN"];

afterAll(shutDown);

test.skipIf(!manager || !token)("every page works before a real manager", async () => {
  const context = await (await launch()).newContext({ viewport: { width: 1440, height: 900 }, reducedMotion: "reduce" });
  const page = await context.newPage();
  page.setDefaultTimeout(10_000);
  const errors: string[] = [];
  const button = (name: string) => page.getByRole("button", { name, exact: true });
  const name = `console-test-${process.pid}`;
  page.on("console", (message) => {
    if (message.type() === "error") errors.push(`${message.text()} ${message.location().url}`);
  });
  page.on("pageerror", (error) => errors.push(String(error)));
  try {
    const answer = await page.goto(`${manager}/volumes`);
    expect(answer?.headers()["content-security-policy"]).toContain("default-src 'self'");
    await page.getByLabel("Token").fill(token!);
    await button("Log in").click();
    await page.getByRole("heading", { name: "Volumes", exact: true }).waitFor();
    await page.getByText("live", { exact: true }).waitFor();
    errors.length = 0; // The first question without a cookie is refused.

    await button("Create volume").click();
    await page.getByRole("dialog").getByLabel("Name").fill(name);
    await page.getByRole("dialog").getByLabel("Size").fill("64M");
    await button("Create").click();
    await page.getByRole("heading", { name, exact: true }).waitFor();
    await button("Grow").click();
    await page.getByRole("dialog").getByRole("textbox").fill("128M");
    await page.getByRole("dialog").getByRole("button", { name: "Grow" }).click();
    await page.getByText("128 MiB").first().waitFor();
    await page.getByText("volume grown").first().waitFor();

    const brick = (await page.locator("a[href^='/bricks/']").first().getAttribute("href"))!;
    for (const path of ["/", "/bricks", brick, "/volumes", `/volumes/${name}`, "/files", "/events", "/tokens"]) {
      await page.goto(manager! + path);
      await page.getByRole("heading", { level: 1 }).waitFor();
      await page.waitForTimeout(700);
      expect(await page.getByRole("alert").allTextContents(), path).toEqual([]);
      expect(await overflow(page), path).toBeLessThanOrEqual(0);
      expect(await violations(page), path).toEqual([]);
      await shoot(page, `real${path.replaceAll("/", "-")}`, 1440, "light");
    }
    await page.goto(`${manager}/volumes/${name}`);
    await button("Delete").click();
    await page.getByRole("dialog").getByRole("textbox").fill(name);
    await button("Delete volume").click();
    await page.getByRole("heading", { name: "Volumes", exact: true }).waitFor();
    expect(errors).toEqual([]);
  } finally {
    await context.close();
  }
});
