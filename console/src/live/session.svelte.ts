// The reader's token as the manager knows it: nobody yet, somebody, or refused.

import * as calls from "../api/calls.ts";
import { asApiError, onOutcome, type ApiError } from "../api/client.ts";
import type { Role, WhoAmI } from "../api/types.ts";
import { denial, includes } from "../text/words.ts";

type Phase = "asking" | "out" | "in";

class Session {
  phase = $state<Phase>("asking");
  who = $state<WhoAmI | null>(null);
  /** Why the login page is shown, if the reader had been logged in. */
  reason = $state<string | null>(null);
  /** When the manager stopped answering; null while it answers. */
  unreachableSince = $state<number | null>(null);

  constructor() {
    onOutcome((error) => this.#hear(error));
  }

  get role(): Role | null {
    return this.who?.role ?? null;
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
      this.who = null;
      this.phase = "out";
      this.reason = "Your token has expired or was revoked. Log in again.";
    }
  }

  markUnreachable(): void {
    this.unreachableSince ??= Date.now();
  }

  /** Learns who the cookie stands for. */
  async ask(): Promise<void> {
    try {
      this.who = await calls.whoami();
      this.phase = "in";
      this.reason = null;
    } catch (error) {
      const found = asApiError(error);
      if (!found.isUnreachable) this.phase = "out";
    }
  }

  async login(token: string): Promise<void> {
    this.who = await calls.login(token);
    this.phase = "in";
    this.reason = null;
  }

  async logout(): Promise<void> {
    try {
      await calls.logout();
    } finally {
      this.who = null;
      this.phase = "out";
      this.reason = null;
    }
  }
}

export const session = new Session();
