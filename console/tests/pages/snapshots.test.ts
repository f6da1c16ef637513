// The controls of snapshots and schedules, each used once, over the mock.

import { afterAll, expect } from "vitest";
import { check, shutDown } from "./browser.ts";

afterAll(shutDown);

check("a snapshot is created, held, released and deleted", { path: "/volumes/mail" }, async (page, { mock }) => {
  const panel = page.getByRole("region", { name: "Snapshots" });
  const dialog = page.getByRole("dialog");
  await panel.getByText("auto-", { exact: false }).first().waitFor();
  await panel.getByRole("button", { name: "Create snapshot" }).click();
  await dialog.getByLabel("Name").fill("a@b");
  await dialog.getByText("Use 1 to 64 letters").waitFor();
  await dialog.getByLabel("Name").fill("before-upgrade");
  await dialog.getByRole("button", { name: "Create snapshot" }).click();
  const row = panel.getByRole("row").filter({ hasText: "before-upgrade" });
  await row.waitFor();
  await row.getByRole("button", { name: "Hold" }).click();
  await dialog.getByLabel("Tag").fill("keep");
  await dialog.getByRole("button", { name: "Hold" }).click();
  await row.getByText("keep").waitFor();
  expect(await row.getByRole("button", { name: "Delete" }).isDisabled()).toBe(true);
  await row.getByRole("button", { name: "Release" }).click();
  await dialog.getByRole("button", { name: "Release" }).click();
  await row.getByRole("button", { name: "Delete" }).click();
  await dialog.getByLabel("Type", { exact: false }).fill("before-upgrade");
  await dialog.getByRole("button", { name: "Delete snapshot" }).click();
  await row.waitFor({ state: "detached" });
  expect(mock.world.snapshots.some((it) => it.name === "before-upgrade")).toBe(false);
});

check("the space of snapshots is counted on demand", { path: "/volumes/mail" }, async (page) => {
  const panel = page.getByRole("region", { name: "Snapshots" });
  await panel.getByRole("button", { name: "Show space" }).click();
  await panel.getByText("besides the", { exact: false }).waitFor();
  const row = panel.getByRole("row").filter({ hasText: "auto-" }).first();
  expect(await row.getByText("3 MiB", { exact: true }).count()).toBe(1);
  await row.getByRole("button", { name: "Roll back" }).click();
  const dialog = page.getByRole("dialog");
  await dialog.getByText("pagemesh snapshot rollback mail@auto-", { exact: false }).first().waitFor();
  await page.keyboard.press("Escape");
  await row.getByRole("button", { name: "Delete" }).click();
  await dialog.getByText("3 MiB in each copy are freed", { exact: false }).waitFor();
});

check("a schedule is created", { path: "/schedules" }, async (page, { mock }) => {
  await page.getByRole("button", { name: "Create schedule" }).click();
  const dialog = page.getByRole("dialog");
  await dialog.getByLabel("Name").fill("gold");
  await dialog.getByLabel("Volumes", { exact: true }).fill("db-* a/b");
  await dialog.getByText("a/b is no name", { exact: false }).waitFor();
  await dialog.getByLabel("Volumes", { exact: true }).fill("db-* tier=gold");
  await dialog.getByLabel("One moment", { exact: false }).check();
  await dialog.getByRole("button", { name: "Create schedule" }).click();
  await page.getByRole("row").filter({ hasText: "gold" }).first().waitFor();
  const made = mock.world.schedules.find((it) => it.info.name === "gold")!.info.policy;
  expect([made.volumes, made.group]).toEqual([["db-*", "tier=gold"], true]);
});

check("a volume that receives shows that nobody else makes snapshots", { path: "/volumes/dr-orders", prepare: (mock) => void Object.assign(mock.world.volumes.find((it) => it.info.name === "dr-orders")!.info, { received: 3, attached: null }) }, async (page) => {
  await page.getByText("receives snapshots", { exact: true }).waitFor();
  expect(await page.getByRole("button", { name: "Create snapshot" }).isDisabled()).toBe(true);
  await page.locator(".actions").getByRole("button", { name: "Promote", exact: true }).click();
  const dialog = page.getByRole("dialog");
  await dialog.getByLabel("Type", { exact: false }).fill("dr-orders");
  await dialog.getByRole("button", { name: "Promote" }).click();
  await page.getByText("receives snapshots", { exact: true }).waitFor({ state: "detached" });
});

check("schedules show their health and volumes, and are disabled and deleted", { path: "/schedules" }, async (page, { mock }) => {
  const row = page.getByRole("row").filter({ hasText: "nightly" });
  await row.getByText("critical").waitFor();
  await row.getByRole("button", { name: "nightly", exact: true }).click();
  const volumes = page.getByRole("region", { name: "Volumes of nightly" });
  await volumes.getByText("does not answer", { exact: false }).waitFor();
  await row.getByRole("button", { name: "Disable" }).click();
  await row.getByText("disabled").waitFor();
  await row.getByRole("button", { name: "Delete" }).click();
  const dialog = page.getByRole("dialog");
  await dialog.getByLabel("Type", { exact: false }).fill("nightly");
  await dialog.getByRole("button", { name: "Delete schedule" }).click();
  await row.waitFor({ state: "detached" });
  expect(mock.world.schedules.map((it) => it.info.name)).toEqual(["auto"]);
});

check("viewers change neither", { path: "/volumes/mail", role: "viewer" }, async (page) => {
  await page.getByRole("region", { name: "Snapshots" }).getByText("auto-", { exact: false }).first().waitFor();
  expect(await page.getByRole("button", { name: "Create snapshot" }).count()).toBe(0);
});
