// node verify.mjs SECRET TIMESTAMP SIGNATURE < body
import { createHmac, timingSafeEqual } from "node:crypto";
import { readFileSync } from "node:fs";

/** `body` is the Buffer that was received, before any parser. */
function isFromFanfare(secret, timestamp, signature, body) {
  if (!/^\d+$/.test(timestamp) || Math.abs(Date.now() - Number(timestamp)) > 5 * 60 * 1000) return false;
  const digest = createHmac("sha256", secret).update(`${timestamp}.`).update(body).digest("hex");
  const [expected, given] = [Buffer.from(`v1=${digest}`), Buffer.from(signature)];
  return given.length === expected.length && timingSafeEqual(given, expected);
}

const [secret, timestamp, signature] = process.argv.slice(2);
console.log(isFromFanfare(secret, timestamp, signature, readFileSync(0)) ? "verified" : "refused");
