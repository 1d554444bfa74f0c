/* What a run does, and how it has gone. */

import { el, register } from "./common.js";

register("overview", "Overview", {
  show(container) {
    container.append(el("p", {}, "overview"));
  },
});
