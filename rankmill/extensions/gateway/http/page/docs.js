"use strict";
const dark = matchMedia("(prefers-color-scheme: dark)");
const follow = () => document.documentElement.classList.toggle("dark-mode", dark.matches);  // Swagger's own
dark.addEventListener("change", follow);
follow();
window.addEventListener("DOMContentLoaded", () => {
  SwaggerUIBundle({ url: "openapi.json", dom_id: "#swagger-ui", deepLinking: true, validatorUrl: null });
});
