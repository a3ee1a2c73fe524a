#!/usr/bin/env node
// Holds the sandbox awake while a command runs.
//
//     node hold.mjs make test
//
// A hold ends with its connection, however the program ends. `AWAKE_SOCKET` names another socket.

import { spawn } from "node:child_process";
import { connect } from "node:net";
import { createInterface } from "node:readline";

/** Resolves when the hold counts. What comes before a sleep goes to `onSleep(ms, cap)`. Call the result to let go. */
export function hold(onSleep = () => {}) {
  return new Promise((resolve, reject) => {
    const socket = connect(process.env.AWAKE_SOCKET ?? "/run/sbx/awake");
    socket.once("error", reject);
    socket.once("connect", () => socket.write("+"));
    createInterface({ input: socket }).on("line", (line) => {
      const [word, ...rest] = line.split(" ");
      if (word === "held") resolve(() => socket.end());
      if (word === "error") reject(new Error(rest.join(" ")));
      if (word === "sleep") onSleep(Number(rest[0]), rest.includes("cap"));
    });
  });
}

const fail = (text, code) => {
  console.error(text);
  process.exit(code);
};
const [command, ...args] = process.argv.slice(2);
if (!command) fail("usage: hold.mjs COMMAND [ARGUMENT…]", 2);
const onSleep = (ms, cap) => console.error(`sleeps in ${ms} ms${cap ? " whatever is held" : ""}`);
const letGo = await hold(onSleep).catch((error) => fail(`hold.mjs: ${error.message}`, 1));
spawn(command, args, { stdio: "inherit" })
  .on("error", (error) => {
    console.error(error.message);
    process.exitCode = 127;
    letGo();
  })
  .on("exit", (code) => {
    process.exitCode = code ?? 1;
    letGo();
  });
