// Messages of picks, whose layout and constants come from form.py: how coordinates are read.
#ifndef TOLD_H
#define TOLD_H
#include "common.h"

// As Form.offsets has them: parts by their first word, and planes of four bits of coordinates.
typedef struct {
  int64_t numel, slots, octets, nibbles, classes, seconds, planes;
} form;

INLINE uint8_t nibble_in(const int32_t *words, int64_t i) { return ((const uint8_t *)words)[i / 2] >> 4 * (i % 2) & 15; }

// Goes through the picks of one message.
typedef struct {
  const int32_t *row;
  int64_t i, last;  // the pick at which it is, and past the last one
  int64_t place;    // its coordinate
  int64_t word;     // where its mark is
  uint32_t rest;    // marks of this word behind it
  int32_t descends; // whether a coordinate was below the one before it
} reader;

INLINE void locate(reader *r, const form f) {
  if (r->i >= r->last) return;
  while (!r->rest) r->rest = (uint32_t)r->row[++r->word];
  int64_t high = 32 * (r->word - MARKS) + __builtin_ctz(r->rest) - r->i, low = ((const uint8_t *)(r->row + f.octets))[r->i];
  r->rest &= r->rest - 1;
  for (int64_t plane = 0; plane < f.planes; plane++)
    low |= (int64_t)nibble_in(r->row + f.nibbles + plane * ((f.slots + 7) / 8), r->i) << (8 + 4 * plane);
  low |= high << (8 + 4 * f.planes);
  r->descends |= low < r->place, r->place = low;
}

// From the first pick on; there are as many marks as slots.
INLINE void begin_reading(reader *r, const int32_t *row, const form f) {
  r->row = row, r->i = 0, r->last = row[0], r->place = 0, r->word = MARKS - 1, r->rest = 0, r->descends = 0;
  locate(r, f);
}

INLINE void next_pick(reader *r, const form f) { r->i++, locate(r, f); }
#endif
