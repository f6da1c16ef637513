import { expect, test } from "vitest";
import type { BrickDevice } from "../../src/api/types.ts";
import { deviceSign, deviceSigns } from "../../src/text/devices.ts";
import { verdict } from "../../src/text/health.ts";
import { makeWorld, statusOf } from "../../mock/world.ts";

const sound: BrickDevice = { device: "1", is_first: false, size_bytes: 1, used_bytes: 0, state: "active" };
const erroneous: BrickDevice = { ...sound, errors: 2, last_error_s: 60 };
const failed: BrickDevice = { ...erroneous, state: "failed" };

test("a failed device is bad, and one with an error a warning", () => {
  expect(deviceSign(sound, 0)).toBeNull();
  expect(deviceSign(failed, 0)).toMatchObject({ tone: "bad", text: "failed" });
  expect(deviceSign(erroneous, 60)).toMatchObject({ tone: "warn", text: "had an error", title: "2 errors since the brick started, the last one 2 min ago." });
  expect(deviceSigns([sound]).length).toBe(0);
  expect(deviceSigns([sound, failed, failed, erroneous]).map((it) => it.text)).toEqual(["2 failed devices", "a device had an error"]);
});

test("the verdict names the bricks of such devices", () => {
  const world = makeWorld("healthy");
  const [brick] = world.bricks;
  const troubles = (devices: BrickDevice[]) => verdict(statusOf(world), [{ ...brick!, devices }], [], []).troubles.map((it) => [it.tone, it.text]);
  expect(troubles([sound])).toEqual([]);
  expect(troubles([failed, erroneous])).toEqual([["bad", "Brick node-1 has 1 failed device."], ["warn", "Brick node-1 had errors of 1 device."]]);
});
