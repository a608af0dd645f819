// What a part of attention works with: the keys of a block, and tiles of query rows with the running result of each.
#pragma once

#include "attention.h"
#include "exponential.h"
#include "simd.h"
#include "transpose.h"

namespace jaxkv {
namespace JAXKV_TARGET {
namespace {

constexpr int TILE_LANES = 2 * LANES;                    // most query rows of a tile
constexpr int MOST_TILES = PART_ROWS / TILE_LANES + 2;
constexpr int KEYS_AT_ONCE = LANES == 16 ? 8 : 4;        // keys whose scores are in registers together

// Tokens low to high - 1 of a block, all that any query row of the part sees. Nothing else of the pages is ever read.
template <typename T>
struct Block {
  int32_t low, high;
  const T* k[BLOCK];
  const T* v[BLOCK];
  float k_scale[BLOCK], v_scale[BLOCK];
};

// Query rows that are computed together: `vectors` of them side by side in lanes, or, where that is 0, one after the other. Both give the
// same bits: a score is summed over head_dim in order, a value over the block's keys in order, and the sum of exponentials as `row_sum` says.
struct Tile {
  int32_t first, rows, vectors;  // first: of the part's rows
  float* q;                      // lanes: [head_dim, vectors * LANES]; else [rows, head_dim]
  float* values;                 // the same, weighted by exponentials; else [rows, wide]
  float* top;                    // [rows], in lanes filled up to vectors * LANES
  float* total;
};

JAXKV_INLINE int64_t wide_of(int64_t head_dim) { return (head_dim + LANES - 1) / LANES * LANES; }

struct Scratch {
  float *k, *v, *k_turned, *q, *values, *running, *next, *scores, *top, *total;

  JAXKV_INLINE Scratch(float* at, int64_t head_dim) {
    const int64_t wide = wide_of(head_dim);
    const auto take = [&at](int64_t floats) { float* mine = at; at += floats; return mine; };
    k = take(BLOCK * wide), v = take(BLOCK * wide), k_turned = take(BLOCK * wide);
    q = take(PART_ROWS * wide), values = take(PART_ROWS * wide);
    running = take(PART_ROWS * (wide + 2)), next = take(PART_ROWS * (wide + 2));
    scores = take((BLOCK + KEYS_AT_ONCE) * TILE_LANES), top = take(PART_ROWS), total = take(PART_ROWS);
  }
};

int64_t scratch_floats(int64_t head_dim) {
  const int64_t wide = wide_of(head_dim);
  return 3 * BLOCK * wide + PART_ROWS * (4 * wide + 6) + (BLOCK + KEYS_AT_ONCE) * TILE_LANES;
}

JAXKV_INLINE int64_t clamp(int64_t x, int64_t low, int64_t high) { return x < low ? low : x > high ? high : x; }

// Which of a block's tokens the query at position `own` sees: low to high - 1; none where high <= low.
JAXKV_INLINE void visible(const Attention& call, int64_t own, int64_t block, int32_t* low, int32_t* high) {
  const int64_t start = block * BLOCK, begin = call.window == 0 || own < call.window ? 0 : own - call.window + 1;
  *low = int32_t(clamp(begin - start, 0, BLOCK)), *high = int32_t(clamp(own + 1 - start, 0, BLOCK));
}

JAXKV_INLINE int64_t position_of(const Attention& call, const Part& part, int64_t row) {
  return part.first + (part.first_row + row) / call.q_per_kv;
}

// Where the tokens of a block are. A table's entry out of range is clamped.
template <typename T>
void find(const Attention& call, const Part& part, int64_t block, Block<T>* out) {
  int32_t unused;
  visible(call, position_of(call, part, 0), block, &out->low, &unused);
  visible(call, position_of(call, part, part.rows - 1), block, &unused, &out->high);
  const int32_t* table = call.tables + part.row * call.pages_per_seq;
  int32_t at = out->low;
  while (at < out->high) {
    const int64_t position = block * BLOCK + at, column = position / call.page_size, offset = position - column * call.page_size;
    const int64_t page = clamp(table[column], 0, call.num_pages - 1);
    const int64_t slot = (page * call.kv_heads + part.kv_head) * call.page_size + offset;
    const int32_t count = int32_t(clamp(call.page_size - offset, 0, out->high - at));
    for (int32_t i = 0; i < count; ++i) {
      out->k[at + i] = static_cast<const T*>(call.k_pages) + (slot + i) * call.head_dim;
      out->v[at + i] = static_cast<const T*>(call.v_pages) + (slot + i) * call.head_dim;
    }
    if (call.k_scales != nullptr) {
      __builtin_memcpy(out->k_scale + at, call.k_scales + slot, size_t(count) * sizeof(float));
      __builtin_memcpy(out->v_scale + at, call.v_scales + slot, size_t(count) * sizeof(float));
    }
    at += count;
  }
}

// Scores of one key as they enter the softmax.
JAXKV_INLINE F finished_score(const Attention& call, F s, F k_scale) {
  s = s * splat(call.scale);
  if (call.k_scales != nullptr) s = s * k_scale;
  if (call.soft_cap != 0) s = splat(call.soft_cap) * tanh_of(s / splat(call.soft_cap));
  return s;
}

template <typename T>
JAXKV_INLINE F load_some(const T* from, int64_t n) { return n >= LANES ? load(from) : load_tail(from, n); }
template <typename T>
JAXKV_INLINE void store_some(T* to, int64_t n, F x) { n >= LANES ? store(to, x) : store_tail(to, n, x); }

}  // namespace
}  // namespace JAXKV_TARGET
}  // namespace jaxkv
