import { describe, expect, test } from "vitest";
import { silence, silenceWords, verdict } from "../../src/text/health.ts";
import { makeWorld, statusOf } from "../../mock/world.ts";

describe("ages of heartbeats", () => {
  const world = makeWorld("busy");
  const lost = world.bricks.find((it) => it.name === "node-6")!;

  test("the silence of a lost brick grows after the message about it", () => {
    expect(silence({ ...lost, heartbeat_age_ms: 7000 }, 7200)).toBe(7207);
    expect(silenceWords(7207)).toBe("for 2 h");
    expect(silenceWords(silence({ ...lost, heartbeat_age_ms: 0 }, 7))).toBe("for 7 s");
    expect(silenceWords(silence({ ...lost, heartbeat_age_ms: null }, 7200))).toBe("since the manager's start");
  });

  test("the verdict counts the time since it was heard", () => {
    const brick = { ...lost, heartbeat_age_ms: 7000 };
    const text = (heardAgo: number) => verdict(statusOf(world), [brick], [], [], new Map(), () => heardAgo).troubles[0]!.text;
    expect(text(0)).toBe("Brick node-6 has sent no heartbeat for 7 s.");
    expect(text(3 * 3600)).toBe("Brick node-6 has sent no heartbeat for 3 h.");
  });
});
