// The sketch of a gradient: rows of it, added up with signs; see ops/sketch.py. A sum is formed in the order of rows.
#include "common.h"

#define TOGETHER 6  // rows that are added in one pass over the sums: a pass for each takes 1.4 times as long

// A sign is its bit of a float32. Signs of a row are shifted by one against those of the row before it.
INLINE void add_strip(float *restrict out, const float *x, const uint32_t *shared, const uint32_t *own, int64_t width,
                      const int rows, const int64_t size) {
  for (int64_t i = 0; i < size; i++) {
    float sum = out[i];
    for (int k = 0; k < rows; k++) sum += float_of(bits_of(x[i + k * width]) ^ shared[i + k] ^ own[k]);
    out[i] = sum;
  }
}

INLINE void add_rows(float *restrict out, const float *x, const uint32_t *shared, const uint32_t *own, int64_t width,
                     const int rows, int64_t size) {
  int64_t at = 0;
  for (; at + STRIP <= size; at += STRIP) {
    for (int64_t i = 0; i < rows * STRIP; i += 16)  // of the rows that come next, since processors look less far ahead
      __builtin_prefetch(x + at + (rows + i / STRIP) * width + i % STRIP, 0, 2);
    add_strip(out + at, x + at, shared + at, own, width, rows, STRIP);
  }
  add_strip(out + at, x + at, shared + at, own, width, rows, size - at);
}

// Coordinates of one row, of any kind.
INLINE void add_widened(float *restrict out, const void *x, int kind, int64_t first, const uint32_t *shared,
                        const uint32_t *own, int64_t size) {
  float wide[STRIP];
  for (int64_t at = 0; at < size; at += STRIP) {
    int64_t some = size - at < STRIP ? size - at : STRIP;
    add_strip(out + at, widened(x, kind, first + at, some, wide), shared + at, own, 0, 1, some);
  }
}

// Pieces end at a coordinate of their concatenation; out begins with zeros. There are width + shifts - 1 signs that rows
// share: row r has those from r mod shifts on.
EXPORT void ls_sketch(void *const *pieces, const int64_t *ends, const int32_t *kinds, int64_t count,
                      const uint32_t *shared, int64_t shifts, const uint32_t *own, int64_t width, float *out) {
  int64_t row = 0, slot = 0, first = 0;
  for (int64_t piece = 0; piece < count; first = ends[piece++]) {
    int64_t n = ends[piece] - first, size;
    for (int64_t at = 0; at < n; at += size) {
      const uint32_t *signs = shared + row % shifts + slot;
      const float *x = (const float *)pieces[piece] + at;
      if (kinds[piece] == 0 && !slot && n - at >= TOGETHER * width && row % shifts + TOGETHER <= shifts) {
        add_rows(out, x, signs, own + row, width, TOGETHER, width);
        size = TOGETHER * width, row += TOGETHER;
        continue;
      }
      size = n - at < width - slot ? n - at : width - slot;
      if (kinds[piece] == 0)
        add_rows(out + slot, x, signs, own + row, width, 1, size);
      else
        add_widened(out + slot, pieces[piece], kinds[piece], at, signs, own + row, size);
      slot += size;
      if (slot == width) slot = 0, row++;
    }
  }
}
