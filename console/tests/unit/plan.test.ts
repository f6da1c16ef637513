import { describe, expect, test } from "vitest";
import type { CreateVolume } from "../../src/api/types.ts";
import { verdict } from "../../src/text/health.ts";
import { classes, copyOf, createCommand, createPlan, deletePlan, detachReplicaPlan, growPlan, nameError, needsForce, promotePlan, sizeError } from "../../src/text/plan.ts";
import { denial, includes, layoutWords } from "../../src/text/words.ts";
import { makeWorld, statusOf } from "../../mock/world.ts";

const world = makeWorld("busy");
const volume = (name: string) => world.volumes.find((it) => it.info.name === name)!;
const asked: CreateVolume = { name: "v", size_bytes: 2 ** 30, layout: "mirror", copies: 2, content: "blocks" };

describe("what a change will do", () => {
  test("creation names copies, domains and class", () => {
    const { does, doubts } = createPlan(asked, world.bricks);
    expect(does.join(" ")).toContain("2 copies lie in 2 failure domains");
    expect(does.join(" ")).toContain("Class file-sync");
    expect(doubts).toEqual([]);
  });

  test("the manager chooses among several possible classes by room for all legs", () => {
    const [first] = world.bricks;
    const fast = ["rack-8", "rack-9"].map((domain) => ({ ...first!, brick: domain, domain, durability: "pmem" as const, capacity_bytes: 2 ** 30, used_bytes: 0 }));
    const { does, doubts } = createPlan({ ...asked, layout: "stripe+mirror", columns: 4, size_bytes: 2 ** 35 }, [...world.bricks, ...fast]);
    expect(does.join(" ")).toContain("The manager chooses the class: the first of pmem, file-sync with room for 8 legs.");
    expect(does.join(" ")).not.toContain("Class pmem");
    expect(doubts).toEqual([]);
  });

  test("creation doubts what the bricks cannot hold", () => {
    expect(createPlan(asked, []).doubts[0]).toContain("no bricks");
    expect(createPlan({ ...asked, durability: "eadr" }, world.bricks).doubts[0]).toContain("eadr");
    expect(createPlan({ ...asked, durability: "pmem" }, world.bricks).doubts[0]).toContain("2 failure domains");
    expect(createPlan({ ...asked, size_bytes: 2 ** 44 }, world.bricks).doubts[0]).toContain("free");
  });

  test("the command does the same", () => {
    expect(createCommand(asked)).toBe("pagemesh volume create v --size 1G --layout mirror --copies 2");
    expect(createCommand({ ...asked, content: "files", durability: "pmem" })).toBe("pagemesh fs create v --size 1G --copies 2 --class pmem");
  });

  test("deletion and detach warn of the client, and of the last copy", () => {
    expect(deletePlan(volume("pg-orders")).join(" ")).toContain("db-1:4121 has it attached");
    expect(detachReplicaPlan(volume("pg-orders"), 0).join(" ")).toContain("One copy is left");
    expect(needsForce(volume("pg-orders"))).toBe(true);
    expect(needsForce(volume("archive"))).toBe(false);
  });

  test("promotion of a copy that lacks writes says so", () => {
    expect(promotePlan(volume("pg-orders"), 1).join(" ")).toContain("Data loss");
    expect(promotePlan(volume("pg-orders"), 1).join(" ")).toContain("The other copies become stale");
    expect(promotePlan(volume("archive"), 1).join(" ")).toContain("no write is lost, and the other copies stay as they are");
    expect(promotePlan(volume("archive"), 1).join(" ")).not.toContain("become stale");
    expect(copyOf(volume("dr-orders"), 2)).toMatchObject({ isAsynchronous: true, isInSync: false });
  });

  test("growing names both sizes", () => {
    expect(growPlan(volume("mail"), 2 ** 40)[0]).toContain("from 120 GiB to 1 TiB");
  });
});

describe("what the manager would refuse", () => {
  test.each([["", false], ["a", true], ["-a", false], [".a", false], ["a b", false], ["ä", false], ["x".repeat(64), true], ["x".repeat(65), false]])("the name %s", (name, isGood) => {
    expect(nameError(name) === null).toBe(isGood);
  });

  test.each([["1G", 0, true], ["4095", 0, false], ["5000", 0, false], ["1G", 2 ** 30, false], ["x", 0, false]])("the size %s above %d", (text, above, isGood) => {
    expect(sizeError(text, above) === null).toBe(isGood);
  });
});

describe("roles", () => {
  test("each includes the ones before it", () => {
    expect(includes("operator", "viewer")).toBe(true);
    expect(includes("viewer", "operator")).toBe(false);
    expect(includes(null, "viewer")).toBe(false);
    expect(denial("viewer", "admin")).toContain("needs admin");
    expect(denial("admin", "operator")).toBeNull();
  });
});

describe("the verdict", () => {
  const troubled = world.volumes.map((it) => it.info).filter((it) => it.health !== "in-sync");

  test("lists the worst first, each with a way out", () => {
    const found = verdict(statusOf(world), world.bricks, troubled, world.events);
    expect(found.tone).toBe("bad");
    expect(found.troubles[0]?.tone).toBe("bad");
    expect(found.troubles.every((it) => it.hint !== "" && it.path.startsWith("/"))).toBe(true);
  });

  test("a whole cluster is healthy, an empty one is not", () => {
    const healthy = makeWorld("healthy");
    expect(verdict(statusOf(healthy), healthy.bricks, [], []).tone).toBe("good");
    const empty = makeWorld("empty");
    expect(verdict(statusOf(empty), [], [], []).title).toBe("No bricks yet");
  });

  test("degraded volumes beyond the list are counted", () => {
    const many = { ...statusOf(world), volumes_degraded: 900 };
    expect(verdict(many, [], troubled, []).more).toBe(900 - troubled.length);
  });

  test("classes are listed strongest first, living bricks only", () => {
    expect(classes(world.bricks).map((it) => it.durability)).toEqual(["pmem", "file-sync"]);
    expect(layoutWords("stripe+mirror", 4, 2)).toBe("stripe+mirror, 4 columns, 2 copies");
  });
});
