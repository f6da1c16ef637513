// The token of this browser as the manager knows it: not asked yet, valid, or refused.

import * as calls from "../api/calls.ts";
import { hearManagerClock, managerNowMs, monotonicMs } from "./clock.svelte.ts";
import { asApiError, onOutcome, type ApiError } from "../api/client.ts";
import type { Role, WhoAmI } from "../api/types.ts";
import { denial, includes } from "../text/words.ts";

type Phase = "asking" | "out" | "in";

class Session {
  phase = $state<Phase>("asking");
  caller = $state<WhoAmI | null>(null);
  /** The refusal of the question for the name and role, while the page asks again. */
  refusal = $state.raw<ApiError | null>(null);
  /** Why the login page is shown, if the reader had been logged in. */
  reason = $state<string | null>(null);
  /** When the manager stopped answering, by `monotonicMs`; null while it answers. */
  unreachableSince = $state<number | null>(null);
  /** The same moment by the manager's clock. */
  unreachableMoment = $state(0);
  #isAsking = false;

  constructor() {
    onOutcome((error, date) => {
      hearManagerClock(date);
      this.#hear(error);
    });
  }

  get role(): Role | null {
    return this.caller?.role ?? null;
  }

  may(needed: Role): boolean {
    return includes(this.role, needed);
  }

  denial(needed: Role): string | null {
    return denial(this.role, needed);
  }

  #hear(error: ApiError | null): void {
    if (error?.isUnreachable) {
      this.markUnreachable();
      return;
    }
    this.unreachableSince = null;
    if (error?.status === 401 && this.phase === "in") {
      this.caller = null;
      this.phase = "out";
      this.reason = "Your token has expired or was revoked. Log in with another one; an admin makes it with the command below.";
    }
  }

  markUnreachable(): void {
    if (this.unreachableSince !== null) return;
    this.unreachableSince = monotonicMs();
    this.unreachableMoment = managerNowMs();
  }

  /** Asks for the name and role of the token in the cookie. Only the refusal of the token (401) leads to the login. */
  async ask(): Promise<void> {
    if (this.#isAsking) return;
    this.#isAsking = true;
    try {
      this.caller = await calls.whoami();
      this.phase = "in";
      this.reason = null;
      this.refusal = null;
    } catch (error) {
      const found = asApiError(error);
      this.refusal = found.isUnreachable || found.status === 401 ? null : found;
      if (found.status === 401) this.phase = "out";
    } finally {
      this.#isAsking = false;
    }
  }

  async login(token: string): Promise<void> {
    this.caller = await calls.login(token);
    this.phase = "in";
    this.reason = null;
  }

  async logout(): Promise<void> {
    try {
      await calls.logout();
    } finally {
      this.caller = null;
      this.phase = "out";
      this.reason = null;
    }
  }
}

export const session = new Session();
