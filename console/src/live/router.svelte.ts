// The address of the page. Links are ordinary ones; a click on a link within the console changes the page without a
// new load.

import { parseRoute, queryText, type Route } from "../text/route.ts";

class Router {
  path = $state(location.pathname);
  query = $state.raw(new URLSearchParams(location.search));
  readonly route: Route = $derived(parseRoute(this.path));

  constructor() {
    addEventListener("popstate", () => this.#read());
    addEventListener("click", (event) => this.#click(event));
  }

  go(to: string): void {
    if (to === location.pathname + location.search) return;
    history.pushState(null, "", to);
    this.#read();
    scrollTo(0, 0);
  }

  /** Changes the query of the present page without an entry in the history. */
  setQuery(values: Record<string, string | null | undefined>): void {
    history.replaceState(null, "", this.path + queryText(values));
    this.#read();
  }

  #read(): void {
    this.path = location.pathname;
    this.query = new URLSearchParams(location.search);
  }

  #click(event: MouseEvent): void {
    if (event.defaultPrevented || event.button !== 0 || event.metaKey || event.ctrlKey || event.shiftKey || event.altKey) return;
    const link = event.target instanceof Element ? event.target.closest("a") : null;
    if (!link || link.target !== "" || link.hasAttribute("download") || link.origin !== location.origin) return;
    if (link.getAttribute("href")?.startsWith("#") || link.pathname.startsWith("/api/")) return;
    event.preventDefault();
    this.go(link.pathname + link.search);
  }
}

export const router = new Router();
