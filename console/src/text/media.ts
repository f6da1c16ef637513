// The bytes written to media, and their ratio to the bytes of users, as a sentence.

import type { RecentFigures } from "../api/types.ts";
import { bytes } from "./format.ts";

/** The sentence about the last minute; none if no brick has reported. */
export function mediaNote(figures: RecentFigures): string | null {
  const media = figures.media;
  if (!media) return null;
  const { data_bytes, journal_bytes, table_bytes } = media.written;
  const rate = (data_bytes + journal_bytes + table_bytes) / Math.max(figures.window_s, 1);
  const written = `Written to media in the last minute: ${bytes(rate)}/s`;
  if (media.per_user_byte === null || media.metadata_per_user_byte === null) return `${written}.`;
  const [all, metadata] = [media.per_user_byte.toFixed(2), media.metadata_per_user_byte.toFixed(2)];
  return `${written}, ${all} bytes per user byte, ${metadata} of them metadata. Each copy counts.`;
}
