// Light or dark: by the system unless the reader chose one. The choice stays in the browser.

export type Theme = "system" | "light" | "dark";

const KEY = "pagemesh-theme";

function stored(): Theme {
  try {
    const found = localStorage.getItem(KEY);
    return found === "light" || found === "dark" ? found : "system";
  } catch {
    return "system";
  }
}

class ThemeChoice {
  choice = $state<Theme>(stored());
  /** Rises when colours change, so that charts are drawn again. */
  generation = $state(0);

  constructor() {
    this.#apply();
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
      this.generation += 1;
    });
  }

  set(choice: Theme): void {
    this.choice = choice;
    try {
      if (choice === "system") localStorage.removeItem(KEY);
      else localStorage.setItem(KEY, choice);
    } catch {
      // Without storage the choice lasts as long as the page.
    }
    this.#apply();
    this.generation += 1;
  }

  #apply(): void {
    const root = document.documentElement;
    if (this.choice === "system") delete root.dataset["theme"];
    else root.dataset["theme"] = this.choice;
  }
}

export const theme = new ThemeChoice();
