// Few query rows over a block of keys, as in decoding: keys stand in lanes for the scores, features for the values.
#pragma once

#include "attention_state.h"

namespace jaxkv {
namespace JAXKV_TARGET {
namespace {

constexpr int KEY_VECTORS = BLOCK / LANES < 4 ? BLOCK / LANES : 4;  // vectors of keys whose scores are in registers together
constexpr int ROWS_AT_ONCE = LANES == 16 ? 4 : 2;
constexpr int VALUE_VECTORS = LANES == 16 ? 4 : 2;

// Asks the memory for LANES tokens of the next block: pages lie anywhere, so that the processor does not guess where it will be read.
template <typename T>
JAXKV_INLINE void prefetch(const Block<T>& next, int32_t t, int64_t head_dim) {
  for (int32_t i = t > next.low ? t : next.low; i < t + LANES && i < next.high; ++i) {
    for (int64_t d = 0; d < head_dim; d += int64_t(64 / sizeof(T))) {
      __builtin_prefetch(next.k[i] + d);
      __builtin_prefetch(next.v[i] + d);
    }
  }
}

// [wide, BLOCK]: feature by feature, the keys from low to high - 1 and zeros beside them, in whole vectors.
template <typename T>
void turn_keys(const Block<T>& block, const Block<T>& next, int64_t head_dim, float* turned) {
  for (int32_t t = 0; t < BLOCK; t += LANES) {
    prefetch(next, t, head_dim);
    if (t + LANES <= block.low || t >= block.high) continue;
    for (int64_t d = 0; d < head_dim; d += LANES) {
      F x[LANES];
      for (int i = 0; i < LANES; ++i)
        x[i] = t + i < block.low || t + i >= block.high ? F{} : load_some(block.k[t + i] + d, head_dim - d);
      transpose(x);
      for (int i = 0; i < LANES; ++i) store(turned + (d + i) * BLOCK + t, x[i]);
    }
  }
}

template <int R>
JAXKV_INLINE void row_scores(const float* q, int64_t head_dim, const float* turned, int32_t low, int32_t high, float* scores) {
  constexpr int STEP = KEY_VECTORS * LANES;
  for (int32_t t = low / STEP * STEP; t < high; t += STEP) {
    F sum[R][KEY_VECTORS] = {};
    for (int64_t d = 0; d < head_dim; ++d) {
      F k[KEY_VECTORS];
      for (int j = 0; j < KEY_VECTORS; ++j) k[j] = load(turned + d * BLOCK + t + j * LANES);
      for (int i = 0; i < R; ++i) {
        const F x = splat(q[i * head_dim + d]);
        for (int j = 0; j < KEY_VECTORS; ++j) sum[i][j] = fma(x, k[j], sum[i][j]);
      }
    }
    for (int i = 0; i < R; ++i)
      for (int j = 0; j < KEY_VECTORS; ++j) store(scores + i * BLOCK + t + j * LANES, sum[i][j]);
  }
}

// Sixteen sums of the tokens t mod 16, in order, and these by halves: the halves of more lanes than one vector has are vectors.
JAXKV_INLINE float row_sum(const float* scores) {
  constexpr int VECTORS = 16 / LANES;
  F sums[VECTORS];
  for (int j = 0; j < VECTORS; ++j) {
    sums[j] = load(scores + j * LANES);
    for (int t = 16; t < BLOCK; t += 16) sums[j] += load(scores + t + j * LANES);
  }
  for (int half = VECTORS / 2; half > 0; half /= 2)
    for (int j = 0; j < half; ++j) sums[j] += sums[j + half];
  return sum(sums[0]);
}

// Scores of one query row, which sees the tokens from low to high - 1, become exponentials, times the values' scales. Returns the decay.
template <typename T>
float row_softmax(const Attention& call, const Block<T>& block, int32_t low, int32_t high, float* scores, float* top, float* total) {
  F most = splat(*top);
  const F infinite = splat(-__builtin_inff());
  I lane;
  for (int i = 0; i < LANES; ++i) lane[i] = i;
  const auto each = [&](auto&& step) {
    for (int32_t t = 0; t < BLOCK; t += LANES) step(t, t < high && t + LANES > low);
  };
  each([&](int32_t t, bool any) {
    if (!any) return;
    F x = finished_score(call, load(scores + t), call.k_scales == nullptr ? F{} : load(block.k_scale + t));
    x = choose((U)(lane >= low - t) & (U)(lane < high - t), x, infinite);
    most = max(x, most);
    store(scores + t, x);
  });
  const float now = max_of(most), decay = exp_of(splat(*top) - splat(now))[0];
  each([&](int32_t t, bool any) { store(scores + t, any ? exp_of(load(scores + t) - splat(now)) : F{}); });
  *total = fma(splat(*total), splat(decay), splat(row_sum(scores)))[0];
  *top = now;
  if (call.v_scales != nullptr)
    for (int32_t t = low; t < high; ++t) scores[t] *= block.v_scale[t];
  return decay;
}

// N vectors of features from `d` on, of R query rows that see the same tokens; `n` is how many features are left where N is 1.
template <typename T, int R, int N>
JAXKV_INLINE void row_values(const Block<T>& block, int32_t low, int32_t high, const float* scores, const float* decay, float* values,
                             int64_t wide, int64_t d, int64_t n) {
  F sum[R][N];
  for (int i = 0; i < R; ++i)
    for (int j = 0; j < N; ++j) sum[i][j] = load(values + i * wide + d + j * LANES) * splat(decay[i]);
  for (int32_t t = low; t < high; ++t) {
    F v[N];
    for (int j = 0; j < N; ++j) v[j] = N == 1 ? load_some(block.v[t] + d, n) : load(block.v[t] + d + j * LANES);
    for (int i = 0; i < R; ++i) {
      const F p = splat(scores[i * BLOCK + t]);
      for (int j = 0; j < N; ++j) sum[i][j] = fma(p, v[j], sum[i][j]);
    }
  }
  for (int i = 0; i < R; ++i)
    for (int j = 0; j < N; ++j) store(values + i * wide + d + j * LANES, sum[i][j]);
}

template <typename T, int R>
void all_row_values(const Attention& call, const Block<T>& block, int32_t low, int32_t high, const float* scores, const float* decay,
                    float* values) {
  const int64_t wide = wide_of(call.head_dim);
  int64_t d = 0;
  for (; d + VALUE_VECTORS * LANES <= call.head_dim; d += VALUE_VECTORS * LANES)
    row_values<T, R, VALUE_VECTORS>(block, low, high, scores, decay, values, wide, d, 0);
  for (; d < call.head_dim; d += LANES) row_values<T, R, 1>(block, low, high, scores, decay, values, wide, d, call.head_dim - d);
}

template <typename T>
void rows_over_block(const Attention& call, const Part& part, const Tile& tile, const Block<T>& block, int64_t number, const Scratch& room) {
  const int64_t wide = wide_of(call.head_dim);
  float* const scores = room.scores;  // [rows, BLOCK]
  float decay[TILE_LANES];
  int32_t low[TILE_LANES], high[TILE_LANES];
  int at = 0;
  for (; at + ROWS_AT_ONCE <= tile.rows; at += ROWS_AT_ONCE)
    row_scores<ROWS_AT_ONCE>(tile.q + at * call.head_dim, call.head_dim, room.k_turned, block.low, block.high, scores + at * BLOCK);
  for (; at < tile.rows; ++at)
    row_scores<1>(tile.q + at * call.head_dim, call.head_dim, room.k_turned, block.low, block.high, scores + at * BLOCK);
  for (int m = 0; m < tile.rows; ++m) {
    visible(call, position_of(call, part, tile.first + m), number, &low[m], &high[m]);
    decay[m] = row_softmax(call, block, low[m], high[m], scores + m * BLOCK, tile.top + m, tile.total + m);
  }
  for (int m = 0; m < tile.rows;) {
    int alike = 1;
    while (alike < 4 && m + alike < tile.rows && low[m + alike] == low[m] && high[m + alike] == high[m]) ++alike;
    const float* const s = scores + m * BLOCK;
    float* const values = tile.values + m * wide;
    switch (alike) {
      case 1: all_row_values<T, 1>(call, block, low[m], high[m], s, decay + m, values); break;
      case 2: all_row_values<T, 2>(call, block, low[m], high[m], s, decay + m, values); break;
      case 3: all_row_values<T, 3>(call, block, low[m], high[m], s, decay + m, values); break;
      default: all_row_values<T, 4>(call, block, low[m], high[m], s, decay + m, values);
    }
    m += alike;
  }
}

}  // namespace
}  // namespace JAXKV_TARGET
}  // namespace jaxkv
