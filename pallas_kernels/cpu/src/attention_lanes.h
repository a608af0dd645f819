// Many query rows over a block of keys, as in prefill: query rows stand in lanes, keys and values are broadcast number by number.
#pragma once

#include "attention_state.h"

namespace jaxkv {
namespace JAXKV_TARGET {
namespace {

// The tokens of a block as floats.
struct WideBlock {
  int32_t low, high;
  const float* k[BLOCK + KEYS_AT_ONCE];  // behind the last, the last again
  const float* v[BLOCK];
  const float *k_scale, *v_scale;
};

template <int V>
void lane_scores(const Attention& call, const Tile& tile, const WideBlock& block, float* scores) {
  constexpr int W = V * LANES;
  for (int32_t t = block.low; t < block.high; t += KEYS_AT_ONCE) {
    F sum[KEYS_AT_ONCE][V] = {};
    for (int64_t d = 0; d < call.head_dim; ++d) {
      F q[V];
      for (int j = 0; j < V; ++j) q[j] = load(tile.q + d * W + j * LANES);
      for (int i = 0; i < KEYS_AT_ONCE; ++i) {
        const F k = splat(block.k[t + i][d]);
        for (int j = 0; j < V; ++j) sum[i][j] = fma(q[j], k, sum[i][j]);
      }
    }
    for (int i = 0; i < KEYS_AT_ONCE; ++i)
      for (int j = 0; j < V; ++j) store(scores + (t + i) * W + j * LANES, sum[i][j]);
  }
}

// Sixteen sums of the block's tokens t mod 16, in order, and these by halves: as `row_sum` does.
template <int V>
JAXKV_INLINE F lane_sum(const float* scores) {
  constexpr int W = V * LANES;
  F sums[16];
  for (int i = 0; i < 16; ++i) {
    sums[i] = load(scores + i * W);
    for (int t = i + 16; t < BLOCK; t += 16) sums[i] += load(scores + t * W);
  }
  for (int half = 8; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) sums[i] += sums[i + half];
  return sums[0];
}

// Scores become exponentials, times the values' scales; `decay` is what results so far are to be multiplied with. `seen` is null where every
// query row sees all tokens from low to high - 1; else the range that each sees, [2][vectors * LANES].
template <int V>
void lane_softmax(const Attention& call, const Tile& tile, const WideBlock& block, const int32_t* seen, float* scores, F (&decay)[V]) {
  constexpr int W = V * LANES;
  for (int j = 0; j < V; ++j) {
    float* const s = scores + j * LANES;
    const F before = load(tile.top + j * LANES);
    F top = before;
    I low = {}, high = {};
    if (seen != nullptr) low = load_bits<I>(seen + j * LANES), high = load_bits<I>(seen + W + j * LANES);
    for (int32_t t = block.low; t < block.high; ++t) {
      F x = finished_score(call, load(s + t * W), call.k_scales == nullptr ? F{} : splat(block.k_scale[t]));
      if (seen != nullptr) x = choose((U)(t >= low) & (U)(t < high), x, splat(-__builtin_inff()));
      top = max(x, top);
      store(s + t * W, x);
    }
    for (int32_t t = 0; t < BLOCK; ++t)
      store(s + t * W, t < block.low || t >= block.high ? F{} : exp_of(load(s + t * W) - top));
    decay[j] = exp_of(before - top);
    store(tile.top + j * LANES, top);
    store(tile.total + j * LANES, fma(load(tile.total + j * LANES), decay[j], lane_sum<V>(s)));
    if (call.v_scales != nullptr)
      for (int32_t t = block.low; t < block.high; ++t) store(s + t * W, load(s + t * W) * splat(block.v_scale[t]));
  }
}

// D features from `d` on of the values weighted by exponentials.
template <int V, int D>
JAXKV_INLINE void lane_values(const Tile& tile, const WideBlock& block, const float* scores, const F (&decay)[V], int64_t d) {
  constexpr int W = V * LANES;
  F sum[D][V];
  for (int i = 0; i < D; ++i)
    for (int j = 0; j < V; ++j) sum[i][j] = load(tile.values + (d + i) * W + j * LANES) * decay[j];
  for (int32_t t = block.low; t < block.high; ++t) {
    F p[V];
    for (int j = 0; j < V; ++j) p[j] = load(scores + t * W + j * LANES);
    for (int i = 0; i < D; ++i) {
      const F v = splat(block.v[t][d + i]);
      for (int j = 0; j < V; ++j) sum[i][j] = fma(p[j], v, sum[i][j]);
    }
  }
  for (int i = 0; i < D; ++i)
    for (int j = 0; j < V; ++j) store(tile.values + (d + i) * W + j * LANES, sum[i][j]);
}

// The same where a value is infinite or NaN and not every row sees it: row after row, over what it sees.
template <int V>
void lane_values_apart(const Attention& call, const Tile& tile, const WideBlock& block, const int32_t* seen, const float* scores,
                       const F (&decay)[V]) {
  constexpr int W = V * LANES;
  for (int m = 0; m < tile.rows; ++m) {
    for (int64_t d = 0; d < call.head_dim; ++d) {
      float* const at = tile.values + d * W + m;
      F sum = splat(*at) * splat(decay[m / LANES][m % LANES]);
      for (int32_t t = seen[m] > block.low ? seen[m] : block.low; t < seen[W + m] && t < block.high; ++t)
        sum = fma(splat(scores[t * W + m]), splat(block.v[t][d]), sum);
      *at = sum[0];
    }
  }
}

JAXKV_INLINE bool finite_values(const WideBlock& block, int64_t head_dim) {
  F sum = {};
  for (int32_t t = block.low; t < block.high; ++t)
    for (int64_t d = 0; d < head_dim; d += LANES) {
      const F v = load_some(block.v[t] + d, head_dim - d);
      sum += v - v;
    }
  return max_of(choose((U)(sum == sum), F{}, splat(1.0f))) == 0;
}

template <int V>
void lanes_over_block(const Attention& call, const Part& part, const Tile& tile, const WideBlock& block, int64_t number, float* scores) {
  constexpr int W = V * LANES;
  int32_t ranges[2 * W];
  bool all_see_all = true;
  for (int m = 0; m < W; ++m) {
    const int64_t row = tile.first + (m < tile.rows ? m : tile.rows - 1);
    visible(call, position_of(call, part, row), number, &ranges[m], &ranges[W + m]);
    all_see_all &= ranges[m] <= block.low && ranges[W + m] >= block.high;
  }
  const int32_t* const seen = all_see_all ? nullptr : ranges;
  F decay[V];
  lane_scores<V>(call, tile, block, scores);
  lane_softmax<V>(call, tile, block, seen, scores, decay);
  if (seen != nullptr && !finite_values(block, call.head_dim)) {
    lane_values_apart<V>(call, tile, block, seen, scores, decay);
    return;
  }
  int64_t d = 0;
  for (; d + KEYS_AT_ONCE <= call.head_dim; d += KEYS_AT_ONCE) lane_values<V, KEYS_AT_ONCE>(tile, block, scores, decay, d);
  for (; d < call.head_dim; ++d) lane_values<V, 1>(tile, block, scores, decay, d);
}

}  // namespace
}  // namespace JAXKV_TARGET
}  // namespace jaxkv
