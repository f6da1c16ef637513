import "uplot/dist/uPlot.min.css";
import "./base.css";
import "./shell.css";
import { mount } from "svelte";
import App from "./App.svelte";

const target = document.getElementById("app");
if (target) mount(App, { target });
